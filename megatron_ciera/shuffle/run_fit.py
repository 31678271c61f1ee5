"""When a run without a placement file fits its prediction tables, and how they reach every rank of a stage."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch.distributed as dist

from megatron_ciera.flags import CieraConfig
from megatron_ciera.moe.schedule import FitSchedule
from megatron_ciera.shuffle import fit
from megatron_ciera.shuffle.chunk import ChunkShuffle
from megatron_ciera.shuffle.groups import ShuffleGroups
from placement.prediction import LayerTables


class RunFit:
    """One fit at a time, of each stage's layers on the first rank of the stage, in a process of its own.

    When a placement would be fitted, and again whenever experts have moved.

    numbers: global layer numbers of each chunk. sizes: (experts, ranks).
    """

    def __init__(
        self,
        config: CieraConfig,
        chunks: Sequence[ChunkShuffle],
        numbers: Sequence[Sequence[int]],
        groups: ShuffleGroups,
        sizes: tuple[int, int],
        log: Callable[[str], None],
    ):
        self.schedule = FitSchedule(config.placement_fit_iteration, config.placement_refit_interval)
        self.fit_tokens = config.placement_fit_tokens
        self.chunks, self.numbers, self.groups, self.sizes, self.log = chunks, numbers, groups, sizes, log
        self.started_at, self.was_fitted = 0, False
        self._recorded_at = None
        self._process = None
        self._failed: str | None = None
        self._fitted_layers: list[int] = []
        log(
            f"token shuffling: prediction tables fitted at iteration {self.schedule.first}"
            + (f" and every {self.schedule.interval} after it" if self.schedule.interval else "")
            + f", from {self.fit_tokens} tokens"
        )

    def before_step(self, iteration: int) -> None:
        """Records this iteration's routing if it is due."""
        if self._recorded_at is None and self.schedule.is_due(iteration, self.started_at, self.was_fitted):
            self._recorded_at = iteration
            for chunk in self.chunks:
                chunk.recorder = fit.RoutingRecorder(self.fit_tokens)

    def after_step(
        self, iteration: int, expert_to_rank: Mapping[int, np.ndarray]
    ) -> dict[int, LayerTables] | None:
        """Starts the fit after its iteration; tables (global layer -> ) when their time has come. Collective then."""
        if self._recorded_at == iteration:
            self._start(expert_to_rank)
        if self._recorded_at is None or iteration < self._recorded_at + self.schedule.lag:
            return None
        return self._finish()

    def restart(self, iteration: int) -> None:
        """Experts have moved after `iteration`: the next iteration is recorded anew, if the first fit was due."""
        self.cancel()
        self.started_at, self.was_fitted = iteration, False

    def cancel(self) -> None:
        """Ends a fit that nobody waits for any more; the same on every rank."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = self._recorded_at = self._failed = None
        self._disarm()

    def _start(self, expert_to_rank: Mapping[int, np.ndarray]) -> None:
        recorders = self._disarm()
        if self.groups.stage.rank() != 0:
            return
        try:
            windows = self._windows(recorders, expert_to_rank)
            self._fitted_layers = list(windows)
            self._process = fit.start(list(windows.values()), *self.sizes)
        except Exception as error:
            # The other ranks of the stage wait for an answer: what broke here is the answer.
            self._failed = f"{type(error).__name__}: {error}"

    def _windows(
        self, recorders: Sequence[fit.RoutingRecorder], expert_to_rank: Mapping[int, np.ndarray]
    ) -> dict[int, fit.Window]:
        """What the tables of each layer that can shuffle are fitted on, by global layer."""
        windows = {}
        for recorder, numbers in zip(recorders, self.numbers, strict=True):
            found = fit.windows_of(
                recorder.take(),
                {i: expert_to_rank[number] for i, number in enumerate(numbers)},
                len(numbers) - 1,
            )
            windows.update({numbers[index]: window for index, window in found.items()})
        return windows

    def _disarm(self) -> list[fit.RoutingRecorder]:
        recorders = [chunk.recorder for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.recorder = None
        return recorders

    def _finish(self) -> dict[int, LayerTables] | None:
        answer = [None]
        if self.groups.stage.rank() == 0:
            tables = self._failed or fit.tables_of(self._process)
            fitted = isinstance(tables, list)
            answer = [dict(zip(self._fitted_layers, tables, strict=True)) if fitted else tables]
        dist.broadcast_object_list(answer, group=self.groups.stage, group_src=0)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, answer[0] if isinstance(answer[0], str) else None)
        failed = [reason for reason in everyone if reason is not None]
        recorded_at, self._recorded_at, self.was_fitted = self._recorded_at, None, True
        self._process = self._failed = None
        if failed:
            self.log(f"token shuffling: tables of iteration {recorded_at}: nothing changes: {failed[0]}")
            return None
        return answer[0]
