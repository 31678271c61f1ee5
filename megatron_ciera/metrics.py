"""Training metrics, through Megatron's own console, TensorBoard and W&B writers."""

import re
from collections.abc import Mapping

PREFIX = "megatron-ciera/"
_LAYER = re.compile(r"/(layer|mtp)_\d+(_\d+)?$")


def console_line(iteration: int, values: Mapping[str, float]) -> str:
    """One line for Megatron's console log, in the order given; parts of a total (`a/b/c`) that are 0 are left out.

    Values of single layers (`a/b/layer_3`) are left to `layers_line`.
    """
    named = (
        (name, value)
        for name, value in values.items()
        if not _LAYER.search(name) and (value or name.count("/") < 2)
    )
    shown = " | ".join(f"{name}: {_format(value)}" for name, value in named)
    return f" [megatron-ciera] iteration {iteration:8d} | {shown}"


def layers_line(iteration: int, values: Mapping[str, float]) -> str | None:
    """A second line with the values of single layers, `a/b/layer_3: x` as `a/b: 3 x`; None if there are none."""
    metrics: dict[str, list[str]] = {}
    for name, value in values.items():
        if _LAYER.search(name):
            metric, layer = name.rsplit("/", 1)
            metrics.setdefault(metric, []).append(f"{layer.removeprefix('layer_')} {_format(value)}")
    if not metrics:
        return None
    shown = " | ".join(f"{metric}: {', '.join(layers)}" for metric, layers in metrics.items())
    return f" [megatron-ciera] iteration {iteration:8d} by layer | {shown}"


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
