"""Triton kernel behind owners.take on a GPU (NVIDIA and AMD): all rounds of sort-and-take in one launch.

One program handles one column; it ends as soon as every token has its owner. Twin: owners.take_reference.
"""

import torch
import triton
import triton.language as tl

# Tokens of a column that one program can keep in registers.
MOST_TOKENS = 32768


@triton.jit
def _take_kernel(
    priced, order, owners, tokens, room, RANKS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, BLOCK)
    inside = line < tokens
    token = tl.load(order + column * tokens + line, mask=inside, other=0)
    ranks = tl.arange(0, PADDED)
    left = tl.where(ranks < RANKS, room, 0)
    owner = tl.full((BLOCK,), -1, tl.int32)
    waiting = inside
    while tl.sum(waiting.to(tl.int32), 0) > 0:
        best = tl.full((BLOCK,), float("-inf"), tl.float64)
        wanted = tl.zeros((BLOCK,), tl.int32)
        for rank in range(RANKS):
            has_room = tl.sum(tl.where(ranks == rank, left, 0), 0) > 0
            at = priced + (column * RANKS + rank) * tokens + token
            score = tl.load(at, mask=waiting & has_room, other=float("-inf"))
            wanted = tl.where(score > best, rank, wanted)
            best = tl.maximum(score, best)
        for rank in range(RANKS):
            wants = waiting & (wanted == rank)
            place = tl.cumsum(wants.to(tl.int32), 0)
            taken = wants & (place <= tl.sum(tl.where(ranks == rank, left, 0), 0))
            owner = tl.where(taken, rank, owner)
            left = tl.where(ranks == rank, left - tl.sum(taken.to(tl.int32), 0), left)
        waiting = waiting & (owner < 0)
    tl.store(owners + column * tokens + token, owner.to(tl.int64), mask=inside)


def take(priced: torch.Tensor, order: torch.Tensor, room: int) -> torch.Tensor:
    """Twin of owners.take_reference, at most MOST_TOKENS tokens a column. No host synchronisation."""
    columns, ranks, tokens = priced.shape
    owners = torch.empty_like(order)
    block = triton.next_power_of_2(tokens)
    _take_kernel[(columns,)](
        priced,
        order,
        owners,
        tokens,
        room,
        RANKS=ranks,
        PADDED=triton.next_power_of_2(ranks),
        BLOCK=block,
        num_warps=min(32, max(4, block // 256)),
    )
    return owners
