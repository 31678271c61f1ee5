"""When something happened: host times on CPU, CUDA (or HIP) events read late on a GPU.

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

    def is_read(self, stamp: float) -> bool:
        return True

    def seconds(self, stamp: float, base: float) -> float:
        return stamp - base

    def synchronize(self) -> None:
        """Host stamps are there at once."""


class CudaClock:
    """CUDA events. `lane` is the current stream, so that work on side streams is told apart."""

    name = "cuda"

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lane(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def is_read(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def seconds(self, stamp: torch.cuda.Event, base: torch.cuda.Event) -> float:
        return base.elapsed_time(stamp) / 1e3

    def synchronize(self) -> None:
        """NOTE: host synchronisation; at the end of training, or if several iterations are unread."""
        torch.cuda.synchronize()


def when_done(work, clock: HostClock | CudaClock, done: Callable) -> None:
    """Calls `done` with a stamp of the end of `work`, without waiting for it.

    On CPU the thread that finishes the work calls. On a GPU torch calls at once, with a stream current that waits for
    the work, and the stamp is an event of that stream. `work.wait()` on a side stream would not do: it also gives
    up the tensors that NCCL still reads. Work without a future (gloo's reduce-scatter) is never told: its end is
    when somebody has waited for it.
    """
    try:
        future = work.get_future()
    except RuntimeError:
        return
    future.add_done_callback(lambda _: done(clock.stamp()))


def on_gpu() -> bool:
    """Whether there is a CUDA or ROCm device; the CPU layer's stand-in does not count."""
    return torch.cuda.is_available() and bool(torch.version.cuda or torch.version.hip)


def make_clock() -> HostClock | CudaClock:
    """Events where there is a device."""
    return CudaClock() if on_gpu() else HostClock()
