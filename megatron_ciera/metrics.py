"""Training metrics, through Megatron's own console, TensorBoard and W&B writers."""

from collections.abc import Mapping

PREFIX = "megatron-ciera/"


def console_line(iteration: int, values: Mapping[str, float]) -> str:
    """One line for Megatron's console log, in the order given; parts of a total (`a/b/c`) that are 0 are left out."""
    named = ((name, value) for name, value in values.items() if value or name.count("/") < 2)
    shown = " | ".join(f"{name}: {_format(value)}" for name, value in named)
    return f" [megatron-ciera] iteration {iteration:8d} | {shown}"


def write(values: Mapping[str, float], iteration: int, tensorboard_writer, wandb_writer) -> None:
    """Writes `values` where Megatron writes its own; a writer that is None on this rank is skipped."""
    if tensorboard_writer:
        for name, value in values.items():
            tensorboard_writer.add_scalar(PREFIX + name, value, iteration)
    if wandb_writer:
        wandb_writer.log({PREFIX + name: value for name, value in values.items()}, iteration)


def _format(value: float) -> str:
    if isinstance(value, int) or float(value).is_integer():
        return f"{int(value)}"
    return f"{value:.4g}"
