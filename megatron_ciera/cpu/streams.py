"""Streams and events where work is done when the call returns: nothing to order, nothing to wait for.

Used by dist_utils.py, token_dispatcher.py, param_and_grad_buffer.py, the router's and the shared experts'
overlap. Races between streams can therefore not show on CPU.
"""

import contextlib
import time

import torch

from megatron_ciera.cpu.replace import replace


class Event:
    """`torch.cuda.Event`; `elapsed_time` is wall-clock time between two records, in milliseconds."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._time = None

    def record(self, stream=None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream=None) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        if self._time is None or end_event._time is None:
            raise RuntimeError("both events must be recorded before the time between them is known")
        return (end_event._time - self._time) * 1e3


class Stream:
    """`torch.cuda.Stream`; all streams are the calling thread."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, device=None, priority=0, **kwargs):
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def wait_stream(self, stream) -> None:
        return None

    def wait_event(self, event) -> None:
        return None

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


_current = Stream()


def install() -> None:
    """Replace torch.cuda's streams, events and the query for a graph capture."""
    cuda = torch.cuda
    replace(cuda, "Event", Event)
    replace(cuda, "Stream", Stream)
    replace(cuda, "ExternalStream", Stream)
    replace(cuda, "current_stream", lambda device=None: _current)
    replace(cuda, "default_stream", lambda device=None: _current)
    replace(cuda, "set_stream", lambda stream: None)
    replace(cuda, "stream", lambda stream: contextlib.nullcontext(stream))
    replace(cuda, "device", lambda device: contextlib.nullcontext())
    replace(cuda, "is_current_stream_capturing", lambda: False)
