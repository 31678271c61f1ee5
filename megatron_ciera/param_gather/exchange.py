"""The size exchange: the one small all-gather, and the one host synchronisation, that a compressed step adds.

Each rank contributes a vector of int64 of the same, fixed length, so that ranks that went different ways still meet
in one collective and find out:

    version | step counter | hash of decisions | damaged blocks | place of the first | payload bytes by own segment |
    counts of the probe
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ciera.param_gather.errors import REMEDY, ParamGatherError
from megatron_ciera.param_gather.lanes import HostCopy, Lane
from megatron_ciera.param_gather.ledger import Ledger

VERSION = 1
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


class Exchange:
    """Exchanges sizes on a process group of its own, so that an earlier gather may still be on the wire."""

    def __init__(
        self, group, num_slots: int, num_counts: int, device: torch.device, lane: Lane, ledger: Ledger
    ):
        self._group = group
        self._size = dist.get_world_size(group)
        self._lane = lane
        self._ledger = ledger
        self._num_slots = num_slots
        length = len(HEADER) + num_slots + num_counts
        self._outgoing = torch.zeros(length, dtype=torch.int64, device=device)
        self._incoming = torch.empty(self._size * self._outgoing.numel(), dtype=torch.int64, device=device)
        pinned = device.type == "cuda"
        self._header = torch.zeros(3, dtype=torch.int64, pin_memory=pinned)
        self._copy = HostCopy(device)
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._work = None

    def clear(self) -> None:
        self._outgoing.zero_()

    @property
    def counts(self) -> torch.Tensor:
        """This rank's counts of the probe, int64 on the device, to be written between `clear` and `start`."""
        return self._outgoing[len(HEADER) + self._num_slots :]

    def fill(self, slots: Sequence[int], sizes: torch.Tensor) -> None:
        """Puts payload sizes (int64 on the device) into these slots, between `clear` and `start`."""
        key = tuple(slots)
        if key not in self._indices:
            self._indices[key] = torch.tensor(slots, device=sizes.device) + len(HEADER)
        self._outgoing.index_copy_(0, self._indices[key], sizes)

    def start(self, step: int, decisions: int, flags: torch.Tensor) -> None:
        """Sends this rank's vector. Call inside the lane; no host synchronisation.

        Args:
            step: optimizer steps so far.
            decisions: hash of what this rank is about to do.
            flags: int32 `[rows, 2]` damage flags of everything decoded so far.
        """
        self._header[:] = torch.tensor([VERSION, step, decisions])
        self._outgoing[:3].copy_(self._header, non_blocking=True)
        write_damage(self._outgoing[3:5], flags)
        self._work = dist.all_gather_into_tensor(
            self._incoming, self._outgoing, group=self._group, async_op=True
        )
        self._ledger.received("bytes_sent", self._size, 8 * self._outgoing.numel())
        self._ledger.add("exchanges", 1)
        if self._incoming.device.type == "cuda":
            self._work.wait()
            self._copy.start(self._incoming)

    def result(self, describe) -> tuple[torch.Tensor, torch.Tensor]:
        """Every rank's sizes and counts, int64 `[ranks, …]` on the host. NOTE: host synchronisation.

        `describe(rank, row)` puts a row of a rank's flags into words, for messages.

        Raises:
            ParamGatherError: on every rank alike, if counters, decisions or versions differ or blocks are damaged.
        """
        if self._incoming.device.type == "cpu":
            self._work.wait()
            self._copy.start(self._incoming)
        table = self._copy.result().view(self._size, -1)
        self._work = None
        _check_agreement(table)
        check_damage(table[:, 3:5], describe)
        start = len(HEADER)
        return table[:, start : start + self._num_slots], table[:, start + self._num_slots :]

    def check_damage(self, flags: torch.Tensor, describe) -> None:
        """Exchanges damage alone and raises on every rank if there is any. NOTE: host synchronisation."""
        mine = torch.empty(2, dtype=torch.int64, device=flags.device)
        everyone = torch.empty(2 * self._size, dtype=torch.int64, device=flags.device)
        self._lane.after_compute()
        with self._lane.enter():
            write_damage(mine, flags)
            dist.all_gather_into_tensor(everyone, mine, group=self._group)
            self._ledger.received("bytes_sent", self._size, mine.nbytes)
            table = everyone.view(self._size, 2).cpu()
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


def _check_agreement(table: torch.Tensor) -> None:
    for column, what in enumerate(HEADER[:3]):
        values = table[:, column].tolist()
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


def check_damage(table: torch.Tensor, describe) -> None:
    """Raises ParamGatherError if any rank counted damaged blocks.

    Args:
        table: int64 `[ranks, 2]` as `write_damage` made it.
        describe: puts a row of a rank's flags into words, from (rank, row).
    """
    damaged = [
        Damage(rank, blocks, place >> _PLACE_SHIFT, place & (2**_PLACE_SHIFT - 1))
        for rank, (blocks, place) in enumerate(table.tolist())
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
