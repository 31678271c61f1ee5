"""Which rows and assignments go where: pure functions of the routing map, the same on every run.

Legend: T tokens of this rank, E experts (slots), EP expert-parallel ranks, n = E / EP experts on each.
A *row* is a distinct (token, rank) pair; an *assignment* is a selected (token, expert) pair. Rows are ordered by
(rank, token), assignments by (rank, token, expert): each rank's share is one contiguous slice of either.
"""

from dataclasses import dataclass

import torch

# A tag says which of the receiver's experts an assignment is for; the top bit marks the first one of a row.
_SMALL_EXPERTS = 128


@dataclass(frozen=True)
class SendPlan:
    """Sender's half, all on the device of the routing map.

    token_of_row: [rows] int64. rows_of_token: [T, w] int64, this token's rows in rank order, -1 behind the
    last. entry_of_assignment: [assignments] int64, positions in the flattened [T, E] probabilities.
    tags: [assignments] uint8 (int16 from 128 local experts on), see `split_tags`.
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


def count(routing_map: torch.Tensor, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, E] bool -> ([EP] rows for each rank, [E] assignments for each expert), int64. No host sync."""
    experts = routing_map.shape[1]
    hits = routing_map.unflatten(1, (num_ranks, experts // num_ranks)).any(2)
    return hits.sum(0), routing_map.sum(0)


def plan_send(routing_map: torch.Tensor, num_ranks: int, topk: int) -> SendPlan:
    """Plans what this rank sends. Cut the result to the totals of `count` once the host knows them.

    Args:
        routing_map: [T, E] bool by slot, at most `topk` set in a row of it.

    No host synchronisation: positions come from running sums, room is made for topk experts a token. Values
    behind the totals are arbitrary.
    """
    tokens, experts = routing_map.shape
    local = experts // num_ranks
    rows, assignments = tokens * min(topk, num_ranks), tokens * topk
    grouped = routing_map.unflatten(1, (num_ranks, local))
    hits = grouped.any(2)
    row_of_hit = running_position(hits.T).T
    token_ids = torch.arange(tokens, device=routing_map.device)
    token_of_row = _scatter_to(row_of_hit, hits, token_ids[:, None].expand(tokens, num_ranks), rows)
    rows_of_token = compact_columns(hits, row_of_hit, min(topk, num_ranks))

    by_rank = grouped.transpose(0, 1)
    position = running_position(by_rank)
    entries = torch.arange(tokens * experts, device=routing_map.device)
    entries = entries.view(tokens, num_ranks, local).transpose(0, 1)
    entry_of_assignment = _scatter_to(position, by_rank, entries, assignments)
    tags = _scatter_to(position, by_rank, _tags(by_rank), assignments)
    return SendPlan(token_of_row, rows_of_token, entry_of_assignment, tags)


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
    first_of_row = _scatter_to(row_of_assignment, first, assignments, rows)
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


def running_position(mask: torch.Tensor) -> torch.Tensor:
    """For each set element its number among the set ones in row-major order; shape of `mask`, int64."""
    return (mask.reshape(-1).cumsum(0) - 1).view(mask.shape)


def compact_columns(mask: torch.Tensor, values: torch.Tensor, width: int) -> torch.Tensor:
    """[R, C] -> [R, width]: the values where `mask` is set, moved to the left, -1 behind them."""
    column = torch.where(mask, mask.cumsum(1) - 1, width)
    table = torch.full((len(mask), width + 1), -1, dtype=values.dtype, device=mask.device)
    return table.scatter_(1, column, torch.where(mask, values, -1))[:, :width].contiguous()


def _tags(by_rank: torch.Tensor) -> torch.Tensor:
    local = by_rank.shape[-1]
    dtype = tag_dtype(local)
    top_bit = 0x80 if dtype == torch.uint8 else -0x8000
    number = torch.arange(local, device=by_rank.device, dtype=dtype).expand(by_rank.shape)
    first = by_rank & (by_rank.cumsum(-1) == 1)
    return torch.where(first, number | top_bit, number)


def _scatter_to(position: torch.Tensor, mask: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    # Unset elements all land in one spare place behind the end: no compaction, so no host synchronisation.
    target = torch.empty(size + 1, dtype=values.dtype, device=values.device)
    index = torch.where(mask, position, size).reshape(-1)
    return target.scatter_(0, index, values.reshape(-1))[:size]
