"""Reads what `--ciera-record` wrote: one rank's iterations as computation, launches and waits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from megatron_ciera.errors import refuse

FORMAT, VERSION = "megatron-ciera-trace", 1


@dataclass(frozen=True)
class Collective:
    """One recorded collective, from `start` to `end` in seconds.

    num_bytes: the whole of what is gathered or reduced, or what this rank sends.
    """

    kind: str
    role: str
    size: int
    num_bytes: int
    start: float
    end: float


@dataclass(frozen=True)
class Step:
    """compute: `seconds` of the main stream. launch, wait: of collective `call`; a wait has a begin and an end."""

    what: str
    seconds: float = 0.0
    call: int = -1
    begin: float = 0.0
    end: float = 0.0


@dataclass(frozen=True)
class Iteration:
    """One iteration in the order in which the host issued it."""

    number: int
    seconds: float
    steps: tuple[Step, ...]
    calls: Mapping[int, Collective]


@dataclass(frozen=True)
class Trace:
    """header: clock, world, ranks_per_node, features, settings, device. metrics: the last ones reported."""

    path: str
    header: Mapping
    iterations: tuple[Iteration, ...]
    metrics: Mapping

    @property
    def gathers_bf16(self) -> bool:
        """Whether all parameters are gathered in bf16, which is what codecs are counted for; traces of older versions
        do not say, and are taken so."""
        settings = self.header["settings"]
        smaller = settings.get("fp8_param_gather") or settings.get("fp4_param_gather")
        return settings.get("bf16", True) and not smaller

    def typical(self) -> Iteration:
        """The iteration of median duration, without the first, which warms up."""
        candidates = self.iterations[1:] or self.iterations
        middle = median_low([iteration.seconds for iteration in candidates])
        return next(iteration for iteration in candidates if iteration.seconds == middle)


def read_trace(path: str) -> Trace:
    """`path`: a folder written by --ciera-record (rank 0 is taken) or one rank's file; closed or not.

    Raises:
        ConfigurationError: not such a trace, of another version, or without a finished iteration.
    """
    file = Path(path)
    file = file / "trace_rank0.json" if file.is_dir() else file
    try:
        text = file.read_text().rstrip()
        events = json.loads(text if text.endswith("]") else text.rstrip(",") + "]")
        header = events[0]["args"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise refuse("--trace", f"{file} ({error})", "a trace of --ciera-record", "Record one.") from error
    if not isinstance(header, dict) or (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        raise refuse(
            "--trace", f"{file} of another format", f"{FORMAT} {VERSION}", "Record it with this version."
        )
    iterations = tuple(_iterations(events))
    if not iterations:
        raise refuse("--trace", f"{file} without a finished iteration", "one or more", "Record a longer run.")
    if header["settings"].get("pipeline_model_parallel_size", 1) > 1:
        raise refuse(
            "--trace",
            "a run with pipeline parallelism",
            "one without: a recorded receive contains the wait for its sender",
            "Simulate the config instead, without --trace.",
        )
    reported = [event["args"] for event in events if event.get("cat") == "metrics"]
    return Trace(str(file), header, iterations, reported[-1] if reported else {})


def _iterations(events):
    threads = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    by_iteration: dict[int, list] = {}
    for event in events:
        if event.get("ph") == "X":
            by_iteration.setdefault(event["args"]["iteration"], []).append(event)
    for number, group in by_iteration.items():
        whole = [event for event in group if event["cat"] == "iteration"]
        if whole:
            yield Iteration(number, whole[0]["dur"] / 1e6, *_steps(group, threads))


def _steps(events, threads) -> tuple[tuple[Step, ...], dict[int, Collective]]:
    steps, calls = [], {}
    for event in events:
        begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        args, kind = event["args"], event["cat"]
        if kind == "collective":
            calls[args["call"]] = Collective(
                event["name"], args["group"], args["size"], args["bytes"], begin, end
            )
            steps.append(Step("launch", call=args["call"]))
        elif threads.get(event["tid"]) == "compute" and kind == "compute":
            steps.append(Step("compute", seconds=end - begin))
        elif threads.get(event["tid"]) == "compute" and kind == "wait":
            steps.append(Step("wait", call=args["call"], begin=begin, end=end))
    return tuple(steps), calls
