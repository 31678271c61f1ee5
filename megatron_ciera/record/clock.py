"""When something happened: host times on CPU, CUDA events read late on a GPU.

A stamp is taken where the work is issued and turned into seconds only after the iteration, so that recording never
waits for the device.
"""

import time
from collections.abc import Callable

import torch


class HostClock:
    """Host times. On CPU the host is what computes, so they are the times of the work itself."""

    name = "host"

    def stamp(self) -> float:
        return time.perf_counter()

    def lane(self) -> int:
        """Which queue issues work here: 0, the one queue of a CPU."""
        return 0

    def when_done(self, work, group_name: str, done: Callable[[float], None]) -> None:
        """Calls `done` with a stamp of the end of `work`, from the thread that finishes it.

        gloo's reduce-scatter has no future: it is never called, and the end is when somebody has waited for it.
        """
        try:
            future = work.get_future()
        except RuntimeError:
            return
        future.add_done_callback(lambda _: done(time.perf_counter()))

    def is_read(self, stamp: float) -> bool:
        return True

    def seconds(self, stamp: float, base: float) -> float:
        return stamp - base

    def synchronize(self) -> None:
        """Host stamps are there at once."""


class CudaClock:
    """CUDA events. `lane` is the current stream, so that work on side streams is told apart."""

    name = "cuda"

    def __init__(self):
        self._aside: dict[str, torch.cuda.Stream] = {}

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lane(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def when_done(self, work, group_name: str, done: Callable[[torch.cuda.Event], None]) -> None:
        """A side stream of the group waits for `work` and takes the stamp: neither host nor compute stream waits."""
        if group_name not in self._aside:
            self._aside[group_name] = torch.cuda.Stream()
        with torch.cuda.stream(self._aside[group_name]):
            _wait_unrecorded(work)
            done(self.stamp())

    def is_read(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def seconds(self, stamp: torch.cuda.Event, base: torch.cuda.Event) -> float:
        return base.elapsed_time(stamp) / 1e3

    def synchronize(self) -> None:
        """NOTE: host synchronisation, at the end of training only."""
        torch.cuda.synchronize()


def _wait_unrecorded(work) -> None:
    original = getattr(type(work).wait, "_megatron_ciera_original", type(work).wait)
    original(work)


def make_clock() -> HostClock | CudaClock:
    """CUDA events where there is CUDA (on a machine without, torch.cuda is the CPU layer's stand-in)."""
    return CudaClock() if torch.cuda.is_available() and torch.version.cuda else HostClock()
