"""Where the kernels of one stream ran against those of all others, from a profile of one step. GPU only."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

# Only the planner selects largest values.
_MARK = "TopK"


def overlap_of(work: Callable) -> dict[str, float]:
    """Profiles `work`, one step: how long the planner's kernels ran, and what share of that beside others."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return summary(json.loads(path.read_text())["traceEvents"])


def summary(events: list[dict]) -> dict[str, float]:
    """From a trace's events: the planner's stream is the one with most of the kernels that only it uses.

    beside_other_kernels: share of the planner's busy time in which another stream computed or sent as well.
    """
    kernels = [
        (event["args"]["stream"], event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "kernel"
    ]
    marked = [stream for stream, *_, name in kernels if _MARK in name]
    if not marked:
        return {}
    planner = max(set(marked), key=marked.count)
    ours = sorted((begin, end) for stream, begin, end, _ in kernels if stream == planner)
    others = _union((begin, end) for stream, begin, end, _ in kernels if stream != planner)
    busy = sum(end - begin for begin, end in ours)
    beside = sum(_common(begin, end, others) for begin, end in ours)
    return {
        "planner_kernels": len(ours),
        "planner_busy_ms": busy / 1e3,
        "beside_other_kernels": beside / busy,
        "step_busy_ms": sum(end - begin for begin, end in others) / 1e3,
    }


def _union(intervals) -> list[tuple[float, float]]:
    merged: list[list[float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [tuple(pair) for pair in merged]


def _common(begin: float, end: float, others: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in others)
