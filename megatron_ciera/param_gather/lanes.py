"""Where codec work runs: side streams on a GPU, the calling thread on CPU."""

import contextlib
from dataclasses import dataclass

import torch


class Lane:
    """One stream of work beside the compute stream. On CPU, and with `aside=False`, there is only the caller.

    Nothing here waits on the host. Streams are named by the number of their device: asking torch for "the current"
    device costs more than all the rest. `priority`: lower is more urgent, 0 is what NCCL's streams have.
    """

    def __init__(self, device: torch.device, aside: bool = True, priority: int = -1, watch=None):
        self.device = device
        self._stream = None
        if aside and device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=priority)
        self.watch = watch or Stopwatch(device)

    @property
    def aside(self) -> bool:
        """Whether work here runs beside the compute stream."""
        return self._stream is not None

    def enter(self):
        """Context in which torch calls are queued on this lane. Not for use inside itself by one object."""
        return contextlib.nullcontext() if self._stream is None else _Queue(self._stream)

    def after_compute(self) -> None:
        """Later work of this lane starts after what the caller's current stream holds now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device_index))

    def after(self, other: "Lane") -> None:
        """Later work of this lane starts after what `other` holds now."""
        if self._stream is not None:
            self._stream.wait_stream(other._stream)

    def release_parameters(self) -> None:
        """Makes the caller's current stream wait for all work of this lane, before it writes what that reads."""
        self.mark().hold_compute()

    def mark(self) -> "Mark":
        """The point that this lane has reached; `Mark.hold_compute` makes the current stream wait for it."""
        return Mark(self._stream)

    def hold(self, mark: "Mark") -> None:
        """Later work of this lane starts when another lane has passed `mark`."""
        if self._stream is not None:
            self._stream.wait_event(mark.event)


class _Queue:
    """`torch.cuda.stream` without what it asks of the driver each time."""

    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        self._before = torch.cuda.current_stream(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error):
        torch.cuda.set_stream(self._before)


@dataclass(frozen=True)
class Lanes:
    """The lanes of a rank.

    gather: packing, waiting for the wire, decoding, states.
    encode: encoding.
    sizes: the exchange of sizes and its copy to the host, so that the next encoding waits for neither.
    """

    gather: Lane
    encode: Lane
    sizes: Lane

    def release_parameters(self) -> None:
        """Makes the caller's current stream wait for all that reads or writes parameters."""
        self.gather.release_parameters()
        self.encode.release_parameters()


def make_lanes(device: torch.device, aside: bool = True) -> Lanes:
    """Encoding is the least urgent: it must not keep NCCL's kernels from starting."""
    gather = Lane(device, aside)
    return Lanes(gather, Lane(device, aside, 0, gather.watch), Lane(device, aside, -1, gather.watch))


class Stopwatch:
    """Device time of codec work and gathers by name; nothing on CPU, where it would mean nothing.

    Only every EVERY-th step is timed: events cost the host more than some of what they time. Spans of pieces in
    flight together overlap, so the sum of "gather" can exceed the time on the clock.
    """

    NAMES = ("encode", "gather", "decode")
    EVERY = 8

    def __init__(self, device: torch.device):
        self._device = device
        self.running = False
        self._step = 0
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def step(self, number: int) -> None:
        """Step `number` begins; what was timed in an earlier one is forgotten if this one is timed."""
        self.running = self._device.type == "cuda" and number % self.EVERY == 0
        if self.running and number != self._step:  # not: the next group of buckets of the same step
            self._spans.clear()
        self._step = number

    def begin(self):
        """A point on the current stream; None if this step is not timed."""
        if not self.running:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device.index))
        return event

    def end(self, name: str, begin) -> None:
        """Counts the time from `begin` to here on the current stream."""
        if begin is not None:
            self._spans.append((name, begin, self.begin()))

    def read(self) -> dict[str, float]:
        """Milliseconds by name of the latest timed step. NOTE: waits for the device."""
        total = dict.fromkeys(self.NAMES, 0.0) if self._device.type == "cuda" else {}
        for name, begin, end in self._spans:
            end.synchronize()
            total[name] += begin.elapsed_time(end)
        return total


class Mark:
    """A point in a lane's work."""

    def __init__(self, stream):
        self.event = None
        if stream is not None:
            self.event = torch.cuda.Event()
            self.event.record(stream)
            self._device = stream.device_index

    def hold_compute(self) -> None:
        """Makes the caller's current stream wait until the lane has passed this point."""
        if self.event is not None:
            torch.cuda.current_stream(self._device).wait_event(self.event)


class HostCopy:
    """A small device tensor on its way to the host.

    `result()` waits until it has arrived (NOTE: device-to-host synchronisation) and returns it as a CPU tensor, which
    the next `start` overwrites.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._host: torch.Tensor | None = None
        self._event = None

    def start(self, source: torch.Tensor) -> None:
        """Queues the copy on the current stream."""
        if self._device.type == "cpu":
            self._host = source
            return
        if self._host is None or self._host.shape != source.shape:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._host.copy_(source, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self._device.index))

    def result(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host
