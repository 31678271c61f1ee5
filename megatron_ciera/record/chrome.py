"""Iterations as Chrome trace events, one file a rank. The format is in docs/simulator.md.

The file is a JSON array that grows by one line an event and is closed at the end; viewers, and the simulator, also
read one that a killed run left open.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_ciera.record.tap import Marks
from megatron_ciera.simulator.trace import FORMAT, VERSION


class TraceFile:
    """Writes `trace_rank<R>.json` in a folder.

    header: what the simulator needs to know of the run. roles: process-group name to what the group is for.
    """

    def __init__(self, folder: Path, rank: int, header: Mapping, roles: Mapping[str, Mapping]):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"trace_rank{rank}.json"
        self._file = open(self.path, "w")
        self._file.write("[\n")
        self._rank, self._roles, self._names = rank, roles, set()
        self._base = None
        self._end = 0.0
        self._write(
            {
                "ph": "M",
                "name": "process_name",
                "args": {"name": f"rank {rank}", "format": FORMAT, "version": VERSION, **header},
            }
        )

    def iteration(self, marks: Marks, clock) -> None:
        """Writes the events of an iteration whose stamps can be read."""
        if self._base is None:
            self._base = marks.begin
        at = _Reader(clock, self._base)
        begin, end = at(marks.begin), at(marks.end)
        self._end = end
        self._span("iteration", "iteration", "iterations", begin, end, {"iteration": marks.iteration})
        cursor, numbers = {marks.lane: begin}, {}
        for index, (what, lane, call, stamps) in enumerate(marks.events):
            number = numbers.setdefault(id(call), index)
            args = {"iteration": marks.iteration, "call": number}
            stream = "compute" if lane == marks.lane else f"compute {lane}"
            start = at(stamps[0])
            if lane in cursor and start > cursor[lane]:
                self._span("compute", "compute", stream, cursor[lane], start, {"iteration": marks.iteration})
            cursor[lane] = start
            if what == "launch":
                self._collective(call, at, args, stream)
            else:
                cursor[lane] = at(stamps[1])
                self._span("wait", "wait", stream, start, cursor[lane], args)
        if end > cursor[marks.lane]:
            self._span(
                "compute", "compute", "compute", cursor[marks.lane], end, {"iteration": marks.iteration}
            )
        self._file.flush()

    def values(self, iteration: int, values: Mapping) -> None:
        """Rates and counts that features report, as an instant event at the end of what is written."""
        self._write(
            {
                "ph": "i",
                "s": "p",
                "name": "metrics",
                "cat": "metrics",
                "tid": "iterations",
                "ts": 1e6 * self._end,
                "args": {"iteration": iteration, **values},
            }
        )
        self._file.flush()

    def close(self) -> None:
        """Completes the array."""
        self._file.write(
            '{"ph": "M", "name": "process_labels", "pid": %d, "args": {"labels": ""}}\n]\n' % self._rank
        )
        self._file.close()

    def _collective(self, call, at, args: Mapping, stream: str) -> None:
        role = self._roles.get(call.group, {"role": "other", "per_node": call.size})
        start = at(call.issued)
        ended = at(call.ended) if call.ended is not None else start
        details = {"group": role["role"], "size": call.size, "per_node": role["per_node"]}
        self._span(
            call.kind,
            "collective",
            f"{role['role']} group",
            start,
            ended,
            {**args, **details, "bytes": call.num_bytes, "issued_by": stream},
        )

    def _span(self, name: str, kind: str, thread: str, start: float, end: float, args: Mapping) -> None:
        self._write(
            {
                "ph": "X",
                "name": name,
                "cat": kind,
                "tid": thread,
                "ts": 1e6 * start,
                "dur": 1e6 * (end - start),
                "args": args,
            }
        )

    def _write(self, event: dict) -> None:
        thread = event.get("tid")
        if isinstance(thread, str):
            if thread not in self._names:
                self._names.add(thread)
                named = {"ph": "M", "name": "thread_name", "tid": _thread(thread), "args": {"name": thread}}
                self._line(named)
            event = {**event, "tid": _thread(thread)}
        self._line(event)

    def _line(self, event: dict) -> None:
        self._file.write(json.dumps({"pid": self._rank, **event}) + ",\n")


class _Reader:
    def __init__(self, clock, base):
        self._clock, self._base = clock, base

    def __call__(self, stamp) -> float:
        return self._clock.seconds(stamp, self._base)


def _thread(name: str) -> int:
    """A number that is the same in every file: viewers sort threads by it."""
    return sum(ord(letter) * 31**i for i, letter in enumerate(name)) % 1_000_003
