"""Where codec work runs: side streams on a GPU, the calling thread on CPU."""

import contextlib
from dataclasses import dataclass

import torch


class Lane:
    """One stream of work beside the compute stream. On CPU, and with `aside=False`, there is only the caller.

    Nothing here waits on the host. `priority`: of the stream, lower is more urgent, 0 is what NCCL's streams have.
    """

    def __init__(self, device: torch.device, aside: bool = True, priority: int = -1, watch=None):
        self.device = device
        self.watch = watch or Stopwatch(device)
        self._stream = (
            torch.cuda.Stream(device, priority=priority) if aside and device.type == "cuda" else None
        )

    @property
    def aside(self) -> bool:
        """Whether work here runs beside the compute stream."""
        return self._stream is not None

    def enter(self):
        """Context in which torch calls are queued on this lane."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def after_compute(self) -> None:
        """Later work of this lane starts after what the caller's current stream holds now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def release_parameters(self) -> None:
        """Makes the caller's current stream wait for all work of this lane, before it writes what that reads."""
        self.mark().hold_compute()

    def mark(self) -> "Mark":
        """The point that this lane has reached; `Mark.hold_compute` makes the current stream wait for it."""
        return Mark(self._stream)


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

    Spans of pieces in flight together overlap, so the sum of "gather" can exceed the time on the clock.
    """

    NAMES = ("encode", "gather", "decode")

    def __init__(self, device: torch.device):
        self.enabled = device.type == "cuda"
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self):
        """A point on the current stream; None on CPU."""
        if not self.enabled:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, name: str, begin) -> None:
        """Counts the time from `begin` to here on the current stream."""
        if begin is not None:
            self._spans.append((name, begin, self.begin()))

    def take(self) -> dict[str, float]:
        """Milliseconds by name since the last call. NOTE: waits for the device."""
        total = dict.fromkeys(self.NAMES, 0.0) if self.enabled else {}
        for name, begin, end in self._spans:
            end.synchronize()
            total[name] += begin.elapsed_time(end)
        self._spans.clear()
        return total


class Mark:
    """A point in a lane's work."""

    def __init__(self, stream):
        self._event = None
        if stream is not None:
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def hold_compute(self) -> None:
        """Makes the caller's current stream wait until the lane has passed this point."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


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
        self._event.record()

    def result(self) -> torch.Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host
