"""Which rows and assignments go where: pure functions of the routing map, the same on every run.

Legend: T tokens of this rank, E experts (slots), EP expert-parallel ranks, n = E / EP experts on each.
A *row* is a distinct (token, rank) pair; an *assignment* is a selected (token, expert) pair. Rows are ordered by
(rank, token), assignments by (rank, token, expert): each rank's share is one contiguous slice of either.
"""

import functools
from dataclasses import dataclass

import torch

# A tag says which of the receiver's experts an assignment is for; the top bit marks the first one of a row.
_SMALL_EXPERTS = 128


@dataclass(frozen=True)
class SendPlan:
    """Sender's half, all on the device of the routing map.

    token_of_row: [rows] int64. rows_of_token: [T, w] int64, this token's rows in rank order: one column for
    each rank, -1 where there is none; with fewer experts than ranks, moved to the left. entry_of_assignment:
    [assignments] int64, positions in the flattened [T, E] probabilities. tags: [assignments] uint8 (int16 from
    129 local experts on), see `split_tags`.
    """

    token_of_row: torch.Tensor
    rows_of_token: torch.Tensor
    entry_of_assignment: torch.Tensor
    tags: torch.Tensor

    def cut_to(self, rows: int, assignments: int) -> "SendPlan":
        """The plan with only as many entries as there are: `plan_send` makes room for the most there can be."""
        return SendPlan(
            self.token_of_row[:rows],
            self.rows_of_token,
            self.entry_of_assignment[:assignments],
            self.tags[:assignments],
        )


@dataclass(frozen=True)
class ReceivePlan:
    """Receiver's half. A *place* is a position of the experts' input, ordered by (expert, row).

    row_of_place: [assignments] int64. assignment_of_place: [assignments] int64. places_of_row: [rows, w]
    int64, this row's places in expert order, -1 behind the last.
    """

    row_of_place: torch.Tensor
    assignment_of_place: torch.Tensor
    places_of_row: torch.Tensor


def hits_of(routing_map: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """[T, E] bool -> [T, EP] bool: which ranks hold one of the token's experts."""
    return routing_map.unflatten(1, (num_ranks, routing_map.shape[1] // num_ranks)).any(2)


def count(
    routing_map: torch.Tensor, num_ranks: int, hits: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, E] bool -> ([EP] rows for each rank, [E] assignments for each expert), int64. No host sync."""
    hits = hits_of(routing_map, num_ranks) if hits is None else hits
    return hits.sum(0), routing_map.sum(0)


def plan_send(
    routing_map: torch.Tensor, num_ranks: int, topk: int, hits: torch.Tensor | None = None
) -> SendPlan:
    """Plans what this rank sends. Cut the result to the totals of `count` once the host knows them.

    Args:
        routing_map: [T, E] bool by slot, at most `topk` set in a row of it.
        hits: `hits_of` the map, where it is known already.

    No host synchronisation: positions come from running sums, room is made for topk experts a token. Values
    behind the totals are arbitrary. Few launches: each costs the host more than the device.
    """
    tokens, experts = routing_map.shape
    rows, assignments = tokens * min(topk, num_ranks), tokens * topk
    hits = hits_of(routing_map, num_ranks) if hits is None else hits
    fixed = _constants(tokens, experts, num_ranks, routing_map.device)
    number_of_hit = _numbers(hits.T)
    token_of_row = _place(number_of_hit, fixed.token, rows)
    row_of_hit = number_of_hit.view(num_ranks, tokens).T - 1
    if topk < num_ranks:
        row_of_hit = compact_columns(hits, row_of_hit, topk)

    by_rank = routing_map.unflatten(1, (num_ranks, experts // num_ranks)).transpose(0, 1)
    number = _numbers(by_rank)
    entry_of_assignment = _place(number, fixed.entry, assignments)
    first = (by_rank.cumsum(-1) == 1) & by_rank
    tags = _place(number, torch.where(first, fixed.first_tag, fixed.tag).reshape(-1), assignments)
    return SendPlan(token_of_row, row_of_hit.contiguous(), entry_of_assignment, tags)


def plan_receive(tags: torch.Tensor, topk: int, num_local_experts: int, rows: int) -> ReceivePlan:
    """Plans how `rows` received rows are expanded to this rank's experts.

    Args:
        tags: [assignments] in arrival order: by source rank, then as the source ordered them.

    No host synchronisation.
    """
    expert, first = split_tags(tags)
    row_of_assignment = first.cumsum(0) - 1
    assignment_of_place = torch.sort(expert, stable=True).indices
    assignments = torch.arange(len(tags), device=tags.device)
    place_of_assignment = torch.empty_like(assignments)
    place_of_assignment[assignment_of_place] = assignments
    first_of_row = _place((row_of_assignment + 1) * first, assignments, rows)
    width = min(topk, num_local_experts)
    places_of_row = torch.full((rows, width), -1, dtype=torch.int64, device=tags.device)
    column = assignments - first_of_row[row_of_assignment]
    places_of_row[row_of_assignment, column] = place_of_assignment
    return ReceivePlan(row_of_assignment[assignment_of_place], assignment_of_place, places_of_row)


def tag_dtype(num_local_experts: int) -> torch.dtype:
    """One byte a tag while the expert number leaves its top bit free, else two."""
    return torch.uint8 if num_local_experts <= _SMALL_EXPERTS else torch.int16


def split_tags(tags: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tags -> (local expert number, bool: first assignment of its row)."""
    if tags.dtype == torch.uint8:
        return tags & 0x7F, tags >= 0x80
    return tags & 0x7FFF, tags < 0


def compact_columns(mask: torch.Tensor, values: torch.Tensor, width: int) -> torch.Tensor:
    """[R, C] -> [R, width]: the values where `mask` is set, moved to the left, -1 behind them."""
    column = torch.where(mask, mask.cumsum(1) - 1, width)
    table = torch.full((len(mask), width + 1), -1, dtype=values.dtype, device=mask.device)
    return table.scatter_(1, column, torch.where(mask, values, -1))[:, :width].contiguous()


@dataclass(frozen=True)
class _Constants:
    """What does not depend on the routing. token: [EP * T]; entry: [EP * T * n]; tags: [n], of the tag's dtype."""

    token: torch.Tensor
    entry: torch.Tensor
    tag: torch.Tensor
    first_tag: torch.Tensor


@functools.lru_cache(maxsize=4)
def _constants(tokens: int, experts: int, num_ranks: int, device: torch.device) -> _Constants:
    # Kept for the last few shapes: 8 bytes for each (token, expert), and launches saved in every layer.
    local = experts // num_ranks
    token = torch.arange(tokens, device=device).repeat(num_ranks)
    entry = torch.arange(tokens * experts, device=device).view(tokens, num_ranks, local)
    dtype = tag_dtype(local)
    tag = torch.arange(local, device=device, dtype=dtype)
    top_bit = 0x80 if dtype == torch.uint8 else -0x8000
    return _Constants(token, entry.transpose(0, 1).reshape(-1), tag, tag | top_bit)


def _numbers(mask: torch.Tensor) -> torch.Tensor:
    """Flat int64: each set element's number among the set ones in row-major order, from 1; 0 for the others."""
    flat = mask.reshape(-1)
    return flat.cumsum(0) * flat


def _place(number: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    """[size]: the values of numbers 1, 2, ... in this order."""
    # Number 0 lands in a spare place in front: no compaction, so no host synchronisation.
    target = torch.empty(size + 1, dtype=values.dtype, device=values.device)
    return target.scatter_(0, number, values)[1:]
