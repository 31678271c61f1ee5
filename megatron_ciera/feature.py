"""What a feature may hook into. install.py calls these; a feature never patches the training loop itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """The few facts about the run that features need besides the model's own config.

    `publish(name, value)` stores a small picklable value with the run's arguments, and so in every checkpoint
    that follows, where plain Megatron ignores it. `log(text)` prints one line on rank 0.
    """

    load: str | None
    ckpt_step: int | None
    save: str | None
    finetune: bool
    log_interval: int
    train_iters: int | None
    seq_length: int
    micro_batch_size: int
    publish: Callable[[str, Any], None]
    log: Callable[[str], None]


class Feature:
    """One switchable part of this package. Every method is called on every rank, in the same order."""

    name = "feature"
    # All features of the run, this one included; set by the training loop before the first call.
    peers: "list[Feature]" = []

    def model_built(self, model_chunks: list) -> None:
        """DDP-wrapped chunks of this rank exist; no optimizer yet, nothing loaded."""

    def optimizer_built(self, model_chunks: list, optimizer) -> None:
        """The optimizer exists (masters cloned from the model); nothing loaded yet."""

    def loaded(self, model_chunks: list, optimizer, iteration: int) -> None:
        """The checkpoint, if any, is in the model and optimizer. `iteration` is the last finished one."""

    def before_step(self, iteration: int) -> None:
        """Before the forward pass of `iteration` (1-based, absolute)."""

    def after_step(self, iteration: int) -> None:
        """After the optimizer step of `iteration`, before it is logged, evaluated or saved."""

    def before_save(self, iteration: int) -> None:
        """Before a checkpoint of `iteration` is written."""

    def invalidate(self, expert_only: bool = False) -> None:
        """Parameters (of experts only, or all) were rewritten outside the optimizer, on every rank alike."""

    def metrics(self) -> dict[str, float]:
        """Values since the last call, the same on every rank. May communicate; called on every rank."""
        return {}

    def measured_rates(self) -> dict[str, float]:
        """How much of the weights a step changes, by class, for the recorder. Local; no communication."""
        return {}

    def logged(self, iteration: int, values: dict[str, float]) -> None:
        """The metrics of all features up to `iteration` were collected."""

    def finished(self) -> None:
        """Training ended; parameters are gathered on every rank."""

    def effect(self) -> dict[str, str]:
        """What each flag did in the whole run, in words. After the last `metrics`; no communication."""
        return {}

    def without_effect(self) -> dict[str, str]:
        """Flags that changed nothing in the whole run, and why. After the last `metrics`; no communication."""
        return {}
