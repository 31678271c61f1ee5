"""Pieces on the wire, a bounded number at a time, and the handle that Megatron waits for."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_ciera.param_gather.lanes import Lane


class Ring:
    """Receive buffers shared by all gathers of this rank: at most `num_slots` pieces are in flight or undecoded.

    A slot that is taken again first has its former piece finished, whichever bucket it belongs to. On a GPU that only
    queues work; on CPU it waits.
    """

    def __init__(self, num_slots: int, device: torch.device):
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(num_slots)]
        self._owners: list[Transfer | None] = [None] * num_slots
        self._next = 0
        self.num_slots = num_slots

    @property
    def num_bytes(self) -> int:
        """Memory held now."""
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, owner: "Transfer", num_bytes: int) -> torch.Tensor:
        """A uint8 buffer of `num_bytes` for `owner`, valid until the slot is taken again. Call in the lane."""
        slot, self._next = self._next, (self._next + 1) % self.num_slots
        if self._owners[slot] is not None:
            self._owners[slot].finish()
        self._owners[slot] = owner
        if self._buffers[slot].numel() < num_bytes:
            device = self._buffers[slot].device
            self._buffers[slot] = torch.empty(0, dtype=torch.uint8, device=device)
            self._buffers[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._buffers[slot][:num_bytes]


class Transfer:
    """One all-gather: `launch` queues it, `finish` makes its result usable in the lane. Both are called in the lane.

    `launch` is called once; `finish` may be called again."""

    def __init__(self, lane: Lane):
        self._lane = lane
        self._work = None
        self._begin = None
        self._finished = False

    def launch(self) -> None:
        self._begin = self._lane.watch.begin()
        self._work = self._start()

    def finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._work.wait()
        self._work = None
        self._lane.watch.end("gather", self._begin)
        begin = self._lane.watch.begin()
        self._complete()
        self._lane.watch.end("decode", begin)

    def _start(self):
        raise NotImplementedError

    def _complete(self) -> None:
        raise NotImplementedError


class RawTransfer(Transfer):
    """The plain gather, in place, as Megatron issues it."""

    def __init__(self, lane: Lane, group, gathered: torch.Tensor, own: torch.Tensor):
        super().__init__(lane)
        self._group, self._gathered, self._own = group, gathered, own

    def _start(self):
        return dist.all_gather_into_tensor(self._gathered, self._own, group=self._group, async_op=True)

    def _complete(self) -> None:
        pass


class PayloadTransfer(Transfer):
    """One piece's payloads, all padded to the same number of bytes, through a slot of the ring.

    Args:
        prepare: called first; returns the padded bytes, which all ranks know by then.
        pack: writes this rank's payload into its region of the buffer (uint8, the padded bytes).
        sent: called when the piece is on its way.
        unpack: given the buffer, the padded bytes of one rank after the other, applies the other ranks' payloads.
    """

    def __init__(
        self,
        lane: Lane,
        ring: Ring,
        group,
        size: int,
        rank: int,
        prepare: Callable[[], int],
        pack: Callable[[torch.Tensor], None],
        sent: Callable[[], None],
        unpack: Callable[[torch.Tensor], None],
    ):
        super().__init__(lane)
        self._ring, self._group, self._size, self._rank = ring, group, size, rank
        self._prepare, self._pack, self._sent, self._unpack = prepare, pack, sent, unpack
        self._num_bytes = 0
        self._buffer: torch.Tensor | None = None

    def launch(self) -> None:
        self._num_bytes = self._prepare()
        super().launch()
        self._sent()

    def _start(self):
        self._buffer = self._ring.take(self, self._size * self._num_bytes)
        own = self._buffer[self._rank * self._num_bytes : (self._rank + 1) * self._num_bytes]
        self._pack(own)
        return dist.all_gather_into_tensor(self._buffer, own, group=self._group, async_op=True)

    def _complete(self) -> None:
        self._unpack(self._buffer)
        self._buffer = None


class GatherHandle:
    """What Megatron keeps as `param_gather_handle`: after `wait()`, the current stream sees the new parameters.

    Args:
        transfers: in order; at most `window` are in flight.
        done: called in the lane after the last, to bring the codec states up to date.
    """

    def __init__(self, lane: Lane, transfers: Sequence[Transfer], window: int, done: Callable[[], None]):
        self._lane, self._transfers, self._window, self._done = lane, transfers, window, done
        self._launched = 0
        self._mark = None
        self._complete = False
        with lane.enter():
            self._launch_up_to(window)
            if lane.device.type == "cuda":
                self._run()

    def wait(self) -> None:
        """Makes the current stream wait; on CPU, returns when the parameters are there. May be called again."""
        self._run()
        self._mark.hold_compute()

    def _launch_up_to(self, count: int) -> None:
        while self._launched < min(count, len(self._transfers)):
            self._transfers[self._launched].launch()
            self._launched += 1

    def _run(self) -> None:
        if self._complete:
            return
        self._complete = True
        for index, transfer in enumerate(self._transfers):
            transfer.finish()
            self._launch_up_to(index + 1 + self._window)
        self._mark = self._lane.mark()
        # Not waited for by the compute stream until it writes parameters again (`Lane.release_parameters`).
        self._done()


class Nothing:
    """The handle of a gather that had nothing to send."""

    def wait(self) -> None:
        pass
