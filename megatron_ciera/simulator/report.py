"""Projections as a table, JSON, and a plot."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_ciera.simulator.project import Projection

KINDS = (
    "compute",
    "all_to_all",
    "tensor",
    "pipeline",
    "codec",
    "param_gather",
    "grad_reduce",
    "other",
    "idle",
)


def speedup(projections: Sequence[Projection], of: Projection) -> float | None:
    """Stock time over this one's at the same size, if stock was simulated."""
    stock = [p for p in projections if p.gpus == of.gpus and p.features in ("stock", "recorded")]
    return stock[0].seconds / of.seconds if stock else None


def document(projections: Sequence[Projection], facts: dict) -> dict:
    """The JSON object: `facts` about the run, then one entry for each projection."""
    entries = [
        {
            "gpus": p.gpus,
            "features": p.features,
            "seconds": p.seconds,
            "speedup": speedup(projections, p),
            "split": p.split,
            "busy": p.busy,
            "gather_ratio": p.gather_ratio,
            "rows_per_token": p.rows,
            "rows_source": p.rows_source,
            "memory_gb": None if p.memory is None else p.memory / 1e9,
        }
        for p in projections
    ]
    return {**facts, "projections": entries}


def table(projections: Sequence[Projection]) -> str:
    """Fixed-width text: milliseconds an iteration, and in them what the GPU computes or waits for."""
    shown = [kind for kind in KINDS if any(p.split.get(kind, 0) > 0 for p in projections)]
    width = max(len(p.features) for p in projections) + 2
    head = f"{'GPUs':>6}  {'features':<{width}}{'ms':>10}{'speed-up':>10}{'gather':>9}{'rows':>7}"
    head += "".join(f"{kind:>14}" for kind in shown)
    lines = [head, "-" * len(head)]
    for p in projections:
        gain = speedup(projections, p)
        rows = "-" if p.rows is None else f"{p.rows:.2f}"
        line = f"{p.gpus:>6}  {p.features:<{width}}{1e3 * p.seconds:>10.1f}"
        line += f"{'-' if gain is None else f'{gain:.2f}x':>10}{p.gather_ratio:>9.2f}{rows:>7}"
        line += "".join(f"{100 * p.split.get(kind, 0) / p.seconds:>13.1f}%" for kind in shown)
        lines.append(line)
    return "\n".join(lines)


def plot(projections: Sequence[Projection], path: str, title: str) -> None:
    """Stacked split of time for each size and variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({p.gpus for p in projections})
    figure, axes = pyplot.subplots(
        1, len(sizes), figsize=(3 + 2.2 * len(sizes), 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    colours = dict(zip(KINDS, pyplot.get_cmap("tab10").colors, strict=False))
    for axis, size in zip(axes[0], sizes, strict=True):
        here = [p for p in projections if p.gpus == size]
        below = [0.0] * len(here)
        for kind in KINDS:
            heights = [1e3 * p.split.get(kind, 0.0) for p in here]
            if any(heights):
                axis.bar(range(len(here)), heights, bottom=below, color=colours[kind], label=kind)
                below = [a + b for a, b in zip(below, heights, strict=True)]
        axis.set_xticks(range(len(here)), [p.features for p in here], rotation=60, ha="right")
        axis.set_title(f"{size} GPUs")
    axes[0][0].set_ylabel("ms an iteration")
    axes[0][-1].legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path)
    pyplot.close(figure)


def write_timeline(projection: Projection, path: str) -> None:
    """The simulated timeline as a Chrome trace."""
    streams = {stream: i for i, stream in enumerate(dict.fromkeys(s.op.stream for s in projection.spans))}
    events = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": stream}}
        for stream, tid in streams.items()
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": streams[span.op.stream],
            "name": span.op.key,
            "cat": span.op.kind,
            "ts": 1e6 * span.start,
            "dur": 1e6 * (span.end - span.start),
            "args": {"bytes": dict(span.op.traffic)},
        }
        for span in projection.spans
    ]
    Path(path).write_text(json.dumps({"traceEvents": events}))
