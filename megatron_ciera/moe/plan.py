"""Which rows and assignments go where: pure functions of the routing map, the same on every run.

Legend: T tokens of this rank, E experts (slots), EP expert-parallel ranks, n = E / EP experts on each.
A *row* is a distinct (token, rank) pair; an *assignment* is a selected (token, expert) pair. Rows are ordered by
(rank, token), assignments by (rank, token, expert): each rank's share is one contiguous slice of either. Torch
here, kernels on a GPU (plan_kernels.py), plain loops in reference.py: all three give the same integers.
"""

from dataclasses import dataclass

import torch

from megatron_ciera.moe import devices

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


@dataclass(frozen=True)
class Counts:
    """What a routing map sends where, before it is planned.

    table: [EP, n + 2] int64: rows for the rank, assignments for each of its experts, assignments in all.
    hits: [T, EP] bool, which ranks hold one of a token's experts; columns: the kernels' counts of earlier blocks.
    One of the two is set: what `plan_send` goes on from.
    """

    table: torch.Tensor
    hits: torch.Tensor | None = None
    columns: torch.Tensor | None = None


def count(routing_map: torch.Tensor, num_ranks: int) -> Counts:
    """Counts a [T, E] bool map. No host synchronisation; two launches on a GPU."""
    if devices.has_kernels(routing_map):
        from megatron_ciera.moe import plan_kernels

        table, columns = plan_kernels.count(routing_map, num_ranks)
        return Counts(table, columns=columns)
    by_rank = routing_map.unflatten(1, (num_ranks, routing_map.shape[1] // num_ranks))
    hits, of_expert = by_rank.any(2), by_rank.sum(0)
    table = torch.cat([hits.sum(0)[:, None], of_expert, of_expert.sum(1, keepdim=True)], dim=1)
    return Counts(table, hits=hits)


def plan_send(routing_map: torch.Tensor, num_ranks: int, topk: int, counts: Counts | None = None) -> SendPlan:
    """Plans what this rank sends. Cut the result to the totals of `count` once the host knows them.

    Args:
        routing_map: [T, E] bool by slot, at most `topk` set in a row of it.
        counts: `count` of the map, where it is known already.

    No host synchronisation: positions come from running sums, room is made for topk experts a token. Values
    behind the totals are arbitrary. One launch on a GPU: each costs the host more than the device.
    """
    tokens, experts = routing_map.shape
    places = min(topk, num_ranks)
    rows, assignments = tokens * places, tokens * topk
    counts = count(routing_map, num_ranks) if counts is None else counts
    local = experts // num_ranks
    if counts.columns is not None:
        from megatron_ciera.moe import plan_kernels

        made = plan_kernels.plan_send(
            routing_map, counts.table, counts.columns, places, rows, assignments, tag_dtype(local)
        )
        return SendPlan(*made)
    number_of_hit = _numbers(counts.hits.T)
    tokens_by_rank = torch.arange(tokens, device=routing_map.device).repeat(num_ranks)
    token_of_row = _place(number_of_hit, tokens_by_rank, rows)
    rows_of_token = number_of_hit.view(num_ranks, tokens).T - 1
    if topk < num_ranks:
        rows_of_token = compact_columns(counts.hits, rows_of_token, topk)

    by_rank = routing_map.unflatten(1, (num_ranks, local)).transpose(0, 1)
    entries = torch.arange(tokens * experts, device=routing_map.device).view(tokens, num_ranks, local)
    number = _numbers(by_rank)
    entry_of_assignment = _place(number, entries.transpose(0, 1).reshape(-1), assignments)
    tags = _place(number, _tags(by_rank).reshape(-1), assignments)
    return SendPlan(token_of_row, rows_of_token.contiguous(), entry_of_assignment, tags)


def plan_receive(tags: torch.Tensor, topk: int, num_local_experts: int, rows: int) -> ReceivePlan:
    """Plans how `rows` received rows are expanded to this rank's experts.

    Args:
        tags: [assignments] in arrival order: by source rank, then as the source ordered them.

    No host synchronisation; three launches on a GPU.
    """
    width = min(topk, num_local_experts)
    if devices.has_kernels(tags):
        from megatron_ciera.moe import plan_kernels

        return ReceivePlan(*plan_kernels.plan_receive(tags, width, num_local_experts, rows))
    expert, first = split_tags(tags)
    row_of_assignment = first.cumsum(0) - 1
    assignment_of_place = torch.sort(expert, stable=True).indices
    assignments = torch.arange(len(tags), device=tags.device)
    place_of_assignment = torch.empty_like(assignments)
    place_of_assignment[assignment_of_place] = assignments
    first_of_row = _place((row_of_assignment + 1) * first, assignments, rows)
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


def _tags(by_rank: torch.Tensor) -> torch.Tensor:
    """[EP, T, n] bool -> the tag of each entry, as if it were set."""
    dtype = tag_dtype(by_rank.shape[-1])
    number = torch.arange(by_rank.shape[-1], device=by_rank.device, dtype=dtype).expand(by_rank.shape)
    first = (by_rank.cumsum(-1) == 1) & by_rank
    return torch.where(first, number | (0x80 if dtype == torch.uint8 else -0x8000), number)


def _numbers(mask: torch.Tensor) -> torch.Tensor:
    """Flat int64: each set element's number among the set ones in row-major order, from 1; 0 for the others."""
    flat = mask.reshape(-1)
    return flat.cumsum(0) * flat


def _place(number: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    """[size]: the values of numbers 1, 2, ... in this order."""
    # Number 0 lands in a spare place in front: no compaction, so no host synchronisation.
    target = torch.empty(size + 1, dtype=values.dtype, device=values.device)
    return target.scatter_(0, number, values)[1:]
