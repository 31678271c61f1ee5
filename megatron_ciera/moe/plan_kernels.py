"""Triton kernels behind plan.py on a GPU (NVIDIA and AMD): three for what is sent, three for what arrived.

Each half counts by blocks of tokens or assignments, sums the blocks' counts in order, and writes every position
from those sums. Integers only, no atomics: the result is that of the torch twins in plan.py, value by value.

Legend: T tokens, E experts in EP ranks of n. A *column* holds what every block counted of one thing. Sizes that
change with every batch are not specialised on: a new one must not compile anew.
"""

import torch
import triton
import triton.language as tl

# Values of one tile: more would not fit in registers and shared memory.
_SEND_TILE, _RECEIVE_TILE = 2048, 4096


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _count_kernel(selected, columns, tokens, blocks, RANKS: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    """Columns of one block and rank: rows, assignments of each expert, assignments."""
    block, rank = tl.program_id(0), tl.program_id(1)
    token, expert = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    inside = (token < tokens)[:, None] & (expert < N)[None, :]
    at = token.to(tl.int64)[:, None] * (RANKS * N) + rank * N + expert[None, :]
    tile = tl.load(selected + at, mask=inside, other=0).to(tl.int32)
    by_expert = tl.sum(tile, 0)
    column = columns + rank * (N + 2) * blocks + block
    tl.store(column, tl.sum(tl.max(tile, 1), 0))
    tl.store(column + (1 + expert) * blocks, by_expert, mask=expert < N)
    tl.store(column + (1 + N) * blocks, tl.sum(by_expert, 0))


@triton.jit(do_not_specialize=["blocks"])
def _scan_kernel(columns, totals, blocks, WIDE: tl.constexpr):
    """One column: what earlier blocks counted, in place, and the total."""
    column, block = tl.program_id(0), tl.arange(0, WIDE)
    at = columns + column * blocks + block
    counted = tl.load(at, mask=block < blocks, other=0)
    tl.store(at, tl.cumsum(counted, 0) - counted, mask=block < blocks)
    tl.store(totals + column, tl.sum(counted, 0).to(tl.int64))


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _send_kernel(selected, columns, totals, token_of_row, rows_of_token, entries, tags, tokens, blocks,
                 RANKS: tl.constexpr, N: tl.constexpr, WIDE: tl.constexpr, PLACES: tl.constexpr,
                 TOP_BIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One block of tokens over all ranks: its rows and assignments, each at its number."""
    block, expert = tl.program_id(0), tl.arange(0, WIDE)
    token = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    valid = token < tokens
    inside = valid[:, None] & (expert < N)[None, :]
    first_row, first_assignment = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    place = tl.zeros((BLOCK,), tl.int32)
    for rank in range(RANKS):
        entry = token[:, None] * (RANKS * N) + rank * N + expert[None, :]
        tile = tl.load(selected + entry, mask=inside, other=0).to(tl.int32)
        hit = tl.max(tile, 1)
        column = columns + rank * (N + 2) * blocks + block
        row = first_row + tl.load(column) + tl.cumsum(hit, 0) - hit
        tl.store(token_of_row + row, token, mask=hit > 0)
        if PLACES == RANKS:
            tl.store(rows_of_token + token * PLACES + rank, tl.where(hit > 0, row, -1), mask=valid)
        else:
            tl.store(rows_of_token + token * PLACES + place, row, mask=hit > 0)
            place += hit
        of_token = tl.sum(tile, 1)
        before = first_assignment + tl.load(column + (1 + N) * blocks) + tl.cumsum(of_token, 0) - of_token
        number_in_row = tl.cumsum(tile, 1) - tile
        at = before[:, None] + number_in_row
        tl.store(entries + at, entry, mask=tile > 0)
        tag = expert[None, :] | tl.where(number_in_row == 0, TOP_BIT, 0)
        tl.store(tags + at, tag.to(tags.dtype.element_ty), mask=tile > 0)
        first_row += tl.load(totals + rank * (N + 2))
        first_assignment += tl.load(totals + rank * (N + 2) + 1 + N)
    if PLACES != RANKS:
        for number in tl.static_range(PLACES):
            tl.store(rows_of_token + token * PLACES + number, -1, mask=valid & (number >= place))


@triton.jit(do_not_specialize=["assignments", "blocks"])
def _arrived_kernel(tags, columns, assignments, blocks, N: tl.constexpr, WIDE: tl.constexpr,
                    TOP_BIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Columns of one block of assignments: each expert's, and rows that begin."""
    block, expert = tl.program_id(0), tl.arange(0, WIDE)
    number = block * BLOCK + tl.arange(0, BLOCK)
    tag = tl.load(tags + number, mask=number < assignments, other=0).to(tl.int32) & (2 * TOP_BIT - 1)
    is_for = (tag & (TOP_BIT - 1))[:, None] == expert[None, :]
    is_for = (is_for & (number < assignments)[:, None]).to(tl.int32)
    tl.store(columns + expert * blocks + block, tl.sum(is_for, 0), mask=expert < N)
    tl.store(columns + N * blocks + block, tl.sum((tag >= TOP_BIT).to(tl.int32), 0))


@triton.jit(
    do_not_specialize=["assignments", "blocks"], do_not_specialize_on_alignment=["assignment_of_place"]
)
def _receive_kernel(tags, columns, totals, row_of_place, assignment_of_place, places_of_row, assignments, blocks,
                    N: tl.constexpr, WIDE: tl.constexpr, PLACES: tl.constexpr, TOP_BIT: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
    """One block of assignments: the place of each by (expert, row), and the row's list of places."""
    block, expert = tl.program_id(0), tl.arange(0, WIDE)
    number = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    valid = number < assignments
    tag = tl.load(tags + number, mask=valid, other=0).to(tl.int32) & (2 * TOP_BIT - 1)
    is_for = ((tag & (TOP_BIT - 1))[:, None] == expert[None, :]) & valid[:, None]
    one = is_for.to(tl.int32)
    of_expert = tl.load(totals + expert, mask=expert < N, other=0)
    before = tl.load(columns + expert * blocks + block, mask=expert < N, other=0)
    before += tl.cumsum(of_expert, 0) - of_expert
    place = tl.sum(tl.where(is_for, before[None, :] + tl.cumsum(one, 0) - 1, 0), 1)
    begins = (tag >= TOP_BIT).to(tl.int32)
    row = tl.load(columns + N * blocks + block) + tl.cumsum(begins, 0).to(tl.int64) - 1
    tl.store(row_of_place + place, row, mask=valid)
    tl.store(assignment_of_place + place, number, mask=valid)
    # Its number in the row: how far back the tag that begins the row is.
    index, found = tl.zeros((BLOCK,), tl.int32), begins > 0
    for back in tl.static_range(1, PLACES):
        there = tl.load(tags + number - back, mask=valid & (number >= back), other=0).to(tl.int32)
        index = tl.where(found, index, back)
        found = found | ((there & TOP_BIT) > 0)
    at = places_of_row + row * PLACES
    tl.store(at + index, place, mask=valid)
    following = tl.load(tags + number + 1, mask=number + 1 < assignments, other=TOP_BIT).to(tl.int32)
    last = valid & ((following & TOP_BIT) > 0)
    for behind in tl.static_range(1, PLACES):
        tl.store(at + behind, -1, mask=last & (behind > index))


def count(routing_map: torch.Tensor, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of the counts in plan.count: ([EP, n + 2] int64 counts, columns for `plan_send`). No host sync."""
    tokens, experts = routing_map.shape
    local = experts // num_ranks
    blocks = triton.cdiv(tokens, _tokens(local))
    counts = torch.empty((num_ranks, local + 2), dtype=torch.int64, device=routing_map.device)
    columns = torch.empty((counts.numel(), blocks), dtype=torch.int32, device=routing_map.device)
    if tokens:
        _count_kernel[blocks, num_ranks](
            _bytes(routing_map), columns, tokens, blocks,
            RANKS=num_ranks, N=local, WIDE=_wide(local), BLOCK=_tokens(local),
        )  # fmt: skip
    _scan_kernel[(len(columns),)](columns, counts, blocks, WIDE=_wide(blocks))
    return counts, columns


def plan_send(routing_map, counts, columns, places: int, rows: int, assignments: int, tag_dtype: torch.dtype):
    """Twin of plan.plan_send: its four tensors, with room for `rows` and `assignments`. No host sync."""
    tokens, num_ranks, local = len(routing_map), len(counts), counts.shape[1] - 2
    numbers = torch.empty(rows + tokens * places + assignments, dtype=torch.int64, device=routing_map.device)
    token_of_row, rows_of_token, entries = numbers.split([rows, tokens * places, assignments])
    tags = torch.empty(assignments, dtype=tag_dtype, device=routing_map.device)
    if tokens:
        _send_kernel[(columns.shape[1],)](
            _bytes(routing_map), columns, counts, token_of_row, rows_of_token, entries, tags, tokens,
            columns.shape[1], RANKS=num_ranks, N=local, WIDE=_wide(local), PLACES=places,
            TOP_BIT=_top_bit(tag_dtype), BLOCK=_tokens(local),
        )  # fmt: skip
    return token_of_row, rows_of_token.view(tokens, places), entries, tags


def plan_receive(tags: torch.Tensor, places: int, num_local_experts: int, rows: int):
    """Twin of plan.plan_receive: its three tensors. No host synchronisation."""
    assignments, wide = len(tags), _wide(num_local_experts)
    block = min(256, max(16, _RECEIVE_TILE // wide))
    blocks = triton.cdiv(assignments, block)
    numbers = torch.empty(2 * assignments + rows * places, dtype=torch.int64, device=tags.device)
    row_of_place, assignment_of_place, places_of_row = numbers.split(
        [assignments, assignments, rows * places]
    )
    if assignments:
        columns = torch.empty((num_local_experts + 1, blocks), dtype=torch.int32, device=tags.device)
        totals = torch.empty(num_local_experts + 1, dtype=torch.int64, device=tags.device)
        fixed = {"N": num_local_experts, "WIDE": wide, "TOP_BIT": _top_bit(tags.dtype), "BLOCK": block}
        _arrived_kernel[(blocks,)](tags, columns, assignments, blocks, **fixed)
        _scan_kernel[(len(columns),)](columns, totals, blocks, WIDE=_wide(blocks))
        _receive_kernel[(blocks,)](
            tags, columns, totals, row_of_place, assignment_of_place, places_of_row, assignments, blocks,
            PLACES=places, **fixed,
        )  # fmt: skip
    return row_of_place, assignment_of_place, places_of_row.view(rows, places)


def _bytes(routing_map: torch.Tensor) -> torch.Tensor:
    return routing_map.contiguous().view(torch.uint8)


def _tokens(num_local_experts: int) -> int:
    """Tokens of a block."""
    return min(32, max(8, _SEND_TILE // _wide(num_local_experts)))


def _wide(count: int) -> int:
    return max(2, triton.next_power_of_2(count))


def _top_bit(tag_dtype: torch.dtype) -> int:
    return 0x80 if tag_dtype == torch.uint8 else 0x8000
