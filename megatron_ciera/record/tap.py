"""Every collective of this process, seen where torch.distributed hands it to its process group.

Megatron keeps aliases of torch.distributed's functions from import time, so the functions are the wrong place. All
of them end in methods of `torch.distributed.ProcessGroup`, which this file wraps, with `Work.wait`, while a
recorder runs; `remove` puts the originals back. Arguments and results pass through unchanged.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_ciera.record.clock import on_gpu, when_done

# Method of ProcessGroup: (kind, which argument is the whole of what is gathered, reduced or sent).
_METHODS = {
    "_allgather_base": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "allgather": ("all_gather", 0),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "alltoall_base": ("all_to_all", 1),
    "alltoall": ("all_to_all", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
_MARK = "_megatron_ciera_original"


@dataclass
class Call:
    """One collective: stamps of when it was issued and when it ended (None while it runs)."""

    kind: str
    group: str
    size: int
    num_bytes: int
    lane: int
    issued: Any
    ended: Any = None


@dataclass
class Marks:
    """What happened in one iteration: `events` in host order, each ("launch" | "wait", lane, call, stamps)."""

    iteration: int
    begin: Any
    lane: int
    end: Any = None
    events: list[tuple] = field(default_factory=list)


class Tap:
    """Collects marks between `start` and `stop`; one at a time in a process."""

    def __init__(self, clock):
        self.clock = clock
        self.marks: Marks | None = None
        self._calls: dict[int, Call] = {}  # by id of the Work that its caller holds
        self._coalescing: dict[str, list[Call]] = {}
        self._replaced: list[tuple[type, str, Callable]] = []

    def install(self) -> None:
        """Wraps the methods. Raises RuntimeError if another recorder has."""
        if hasattr(dist.Work.wait, _MARK):
            raise RuntimeError("--ciera-record: a recorder is running in this process; stop it first")
        for name, (kind, argument) in _METHODS.items():
            self._replace(dist.ProcessGroup, name, functools.partial(self._collective, kind, argument))
        self._replace(dist.ProcessGroup, "_start_coalescing", self._start_coalescing)
        self._replace(dist.ProcessGroup, "_end_coalescing", self._end_coalescing)
        self._replace(dist.Work, "wait", self._wait)

    def remove(self) -> None:
        """Puts the originals back."""
        for owner, name, original in self._replaced:
            setattr(owner, name, original)
        self._replaced.clear()

    def start(self, iteration: int) -> None:
        self.marks = Marks(iteration, self.clock.stamp(), self.clock.lane())

    def stop(self) -> Marks:
        """The marks of the iteration; collectives that still run end later, in place."""
        marks, self.marks = self.marks, None
        marks.end = self.clock.stamp()
        self._calls.clear()
        return marks

    def _replace(self, owner: type, name: str, around: Callable) -> None:
        original = getattr(owner, name)

        def method(this, *args, **kwargs):
            return around(original, this, *args, **kwargs)

        setattr(method, _MARK, original)
        self._replaced.append((owner, name, original))
        setattr(owner, name, method)

    def _records(self, group) -> bool:
        return self.marks is not None and group.size() > 1 and not _capturing()

    def _collective(self, kind, argument, original, group, *args, **kwargs):
        if not self._records(group):
            return original(group, *args, **kwargs)
        call = Call(
            kind,
            group.group_name,
            group.size(),
            _num_bytes(args[argument]),
            self.clock.lane(),
            self.clock.stamp(),
        )
        self.marks.events.append(("launch", call.lane, call, (call.issued,)))
        work = original(group, *args, **kwargs)
        if call.group in self._coalescing:
            self._coalescing[call.group].append(call)
        elif work is not None:
            self._follow(work, [call])
        else:  # it ran on the current stream
            call.ended = self.clock.stamp()
        return work

    def _start_coalescing(self, original, group, *args, **kwargs):
        if self._records(group):
            self._coalescing[group.group_name] = []
        return original(group, *args, **kwargs)

    def _end_coalescing(self, original, group, *args, **kwargs):
        work = original(group, *args, **kwargs)
        calls = self._coalescing.pop(group.group_name, [])
        if calls and work is not None:
            self._follow(work, calls)
        return work

    def _follow(self, work, calls: list[Call]) -> None:
        def done(stamp):
            for call in calls:
                call.ended = stamp

        # A backend's own class of works may have its own `wait`.
        owner = next(kind for kind in type(work).__mro__ if "wait" in kind.__dict__)
        if not hasattr(owner.wait, _MARK):
            self._replace(owner, "wait", self._wait)
        self._calls[id(work)] = calls[-1]
        when_done(work, self.clock, done)

    def _wait(self, original, work, *args, **kwargs):
        call = self._calls.pop(id(work), None)
        if self.marks is None or call is None or _capturing():
            return original(work, *args, **kwargs)
        lane, before = self.clock.lane(), self.clock.stamp()
        result = original(work, *args, **kwargs)
        after = self.clock.stamp()
        if call.ended is None:
            call.ended = after
        self.marks.events.append(("wait", lane, call, (before, after)))
        return result


def _capturing() -> bool:
    return on_gpu() and torch.cuda.is_current_stream_capturing()


def _num_bytes(tensors) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_num_bytes(each) for each in tensors)
