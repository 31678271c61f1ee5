"""The size exchange: the one kind of small all-gather, and of host synchronisation, that a compressed step adds.

Each rank contributes a vector of int64 of the same, fixed length, so that ranks that went different ways still meet
in one collective and find out:

    version | step counter | hash of decisions | damaged blocks | place of the first | payload bytes by own segment |
    counts of the probe

At most NUM_TICKETS exchanges are under way; their results are taken in the order in which they were started.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ciera.param_gather.errors import REMEDY, ParamGatherError
from megatron_ciera.param_gather.lanes import HostCopy, Lanes
from megatron_ciera.param_gather.ledger import Ledger

VERSION = 2
NUM_TICKETS = 2
HEADER = ("version", "step", "decisions", "damaged", "place")
_PLACE_SHIFT = 32
_NOWHERE = 2**62


@dataclass(frozen=True)
class Damage:
    """Blocks of gathered words that did not have the hash their owner sent, as one rank counted them."""

    rank: int
    blocks: int
    row: int
    block: int


class Ticket:
    """One exchange's vectors and its way to the host; used again for later exchanges."""

    def __init__(self, size: int, length: int, device: torch.device):
        self.outgoing = torch.zeros(length, dtype=torch.int64, device=device)
        self.incoming = torch.empty(size * length, dtype=torch.int64, device=device)
        self.header = torch.zeros(len(HEADER), dtype=torch.int64, pin_memory=device.type == "cuda")
        self.header_there, self.damage = self.outgoing[: len(HEADER)], self.outgoing[3:5]
        self.copy = HostCopy(device)
        self.work = None

    @property
    def under_way(self) -> bool:
        return self.work is not None


class Exchange:
    """Exchanges sizes on a process group of its own, so that an earlier gather may still be on the wire.

    A step's exchanges are `open` … `start` in the encode lane, then `result`.
    """

    def __init__(
        self, group, num_slots: int, num_counts: int, device: torch.device, lanes: Lanes, ledger: Ledger
    ):
        self._group = group
        self._size = dist.get_world_size(group)
        self._lanes = lanes
        self._ledger = ledger
        self._num_slots = num_slots
        length = len(HEADER) + num_slots + num_counts
        self._tickets = [Ticket(self._size, length, device) for _ in range(NUM_TICKETS)]
        self._device = device
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._next = 0

    def open(self) -> Ticket:
        """A vector to be filled and started; what is not filled means nothing.

        The exchange before last must have been taken in.
        """
        ticket = self._tickets[self._next]
        if ticket.under_way:
            raise RuntimeError(f"more than {NUM_TICKETS} exchanges under way; please report this")
        self._next = (self._next + 1) % NUM_TICKETS
        return ticket

    def counts(self, ticket: Ticket) -> torch.Tensor:
        """This rank's counts of the probe, int64 on the device, to be written before `start`."""
        return ticket.outgoing[len(HEADER) + self._num_slots :]

    def sizes(self, ticket: Ticket, slots: range) -> torch.Tensor:
        """The place of these payload sizes, int64 on the device, to be written before `start`."""
        return ticket.outgoing[len(HEADER) + slots.start : len(HEADER) + slots.stop]

    def fill(self, ticket: Ticket, slots: Sequence[int], sizes: torch.Tensor) -> None:
        """Puts payload sizes (int64 on the device) into these slots, before `start`."""
        key = tuple(slots)
        if key not in self._indices:
            self._indices[key] = torch.tensor(slots, device=sizes.device) + len(HEADER)
        ticket.outgoing.index_copy_(0, self._indices[key], sizes)

    def start(self, ticket: Ticket, step: int, decisions: int, damage: torch.Tensor | None) -> None:
        """Sends this rank's vector. Call inside the encode lane; no host synchronisation.

        Args:
            step: optimizer steps so far.
            decisions: hash of what this rank is about to do.
            damage: what `write_damage` made of the flags; None: not told this time.
        """
        ticket.header.numpy()[:] = VERSION, step, decisions, 0, 0
        ticket.header_there.copy_(ticket.header, non_blocking=True)
        if damage is not None:
            ticket.damage.copy_(damage)
        lane = self._lanes.sizes
        lane.after(self._lanes.encode)
        with lane.enter():
            ticket.work = dist.all_gather_into_tensor(
                ticket.incoming, ticket.outgoing, group=self._group, async_op=True
            )
            if self._device.type == "cuda":
                ticket.work.wait()
                ticket.copy.start(ticket.incoming)
        self._ledger.received("bytes_sent", self._size, 8 * ticket.outgoing.numel())
        self._ledger.add("exchanges", 1)

    def result(self, ticket: Ticket, describe) -> tuple[list[list[int]], torch.Tensor]:
        """Every rank's sizes by slot, and counts, int64 `[ranks, …]` on the host. NOTE: host synchronisation.

        `describe(rank, row)` puts a row of a rank's flags into words, for messages.

        Raises:
            ParamGatherError: on every rank alike, if counters, decisions or versions differ or blocks are damaged.
        """
        if self._device.type == "cpu":
            ticket.work.wait()
            ticket.copy.start(ticket.incoming)
        table = ticket.copy.result().view(self._size, -1)
        ticket.work = None
        start = len(HEADER)
        rows = table[:, : start + self._num_slots].tolist()
        _check_agreement(rows)
        check_damage([row[3:5] for row in rows], describe)
        return [row[start:] for row in rows], table[:, start + self._num_slots :]

    def check_damage(self, flags: torch.Tensor, describe) -> None:
        """Exchanges damage alone and raises on every rank if there is any. NOTE: host synchronisation."""
        mine = torch.empty(2, dtype=torch.int64, device=flags.device)
        everyone = torch.empty(2 * self._size, dtype=torch.int64, device=flags.device)
        lane = self._lanes.gather
        lane.after_compute()
        with lane.enter():
            write_damage(mine, flags)
            dist.all_gather_into_tensor(everyone, mine, group=self._group)
            self._ledger.received("bytes_sent", self._size, mine.nbytes)
            table = everyone.view(self._size, 2).tolist()
        check_damage(table, describe)


def write_damage(out: torch.Tensor, flags: torch.Tensor) -> None:
    """Number of damaged blocks and packed place of the first, into `out` (int64 [2]), without synchronising."""
    if flags.numel() == 0:
        out.zero_()
        return
    rows = torch.arange(flags.size(0), device=flags.device)
    place = (rows << _PLACE_SHIFT) + flags[:, 1]
    out[0] = flags[:, 0].sum()
    out[1] = torch.where(flags[:, 0] > 0, place, _NOWHERE).min()


def _check_agreement(table: Sequence[Sequence[int]]) -> None:
    for column, what in enumerate(HEADER[:3]):
        values = [row[column] for row in table]
        if len(set(values)) > 1:
            raise ParamGatherError(
                f"--ciera: ranks of one data-parallel group differ in {_NAMES[what]}: "
                f"{', '.join(f'rank {rank} has {value}' for rank, value in enumerate(values))}. "
                f"Nothing was sent. {REMEDY}"
            )


_NAMES = {
    "version": "the version of megatron-ciera's exchange",
    "step": "the number of optimizer steps",
    "decisions": "what they are about to gather, and how (hash of decisions)",
}


def check_damage(table: Sequence[Sequence[int]], describe) -> None:
    """Raises ParamGatherError if any rank counted damaged blocks.

    Args:
        table: two numbers a rank as `write_damage` made it.
        describe: puts a row of a rank's flags into words, from (rank, row).
    """
    damaged = [
        Damage(rank, blocks, place >> _PLACE_SHIFT, place & (2**_PLACE_SHIFT - 1))
        for rank, (blocks, place) in enumerate(table)
        if blocks
    ]
    if damaged:
        raise ParamGatherError(
            "--ciera: gathered parameters differ from what their owner sent: "
            + "; ".join(
                f"rank {found.rank} of the group has {found.blocks} bad blocks, the first in "
                f"{describe(found.rank, found.row)}, block {found.block}"
                for found in damaged
            )
            + ". Either parameters were changed outside the optimizer on some ranks (then call "
            f"megatron_ciera.param_gather.weights_changed() after it), or data was corrupted. {REMEDY}"
        )
