"""Where an iteration's time goes, as seen by one stage."""

from collections import defaultdict
from collections.abc import Sequence

from megatron_ciera.simulator.engine import Span

# While nothing computes, the first of these that is running is what the GPU waits for.
_WAITED_FOR = ("all_to_all", "tensor", "pipeline", "codec", "param_gather", "grad_reduce", "other")


def split(spans: Sequence[Span], total: float, prefix: str = "s0.") -> dict[str, float]:
    """Seconds of `total` by kind: `compute` while the compute stream runs, else what it waits for, else `idle`.

    The parts add up to `total`.
    """
    edges = []
    for span in spans:
        if span.op.stream.startswith(prefix) and span.end > span.start:
            edges += [(span.start, 1, span.op.kind), (span.end, -1, span.op.kind)]
    edges.sort(key=lambda edge: edge[0])
    running, parts, now = defaultdict(int), defaultdict(float), 0.0
    for time, change, kind in [*edges, (total, 0, "compute")]:
        if time > now:
            parts[_shown(running)] += time - now
            now = time
        running[kind] += change
    return dict(parts)


def busy(spans: Sequence[Span], prefix: str = "s0.") -> dict[str, float]:
    """Seconds that operations of each kind ran, hidden or not."""
    sums = defaultdict(float)
    for span in spans:
        if span.op.stream.startswith(prefix):
            sums[span.op.kind] += span.end - span.start
    return dict(sums)


def _shown(running) -> str:
    if running["compute"]:
        return "compute"
    return next((kind for kind in _WAITED_FOR if running[kind]), "idle")
