"""Where the tokens of a micro-batch live, and what has to be exchanged between two such layouts.

A micro-batch is [s, b] tokens; token and place numbers are flat, position * b + column. Places are split evenly
over the ranks in order, as sequence parallelism does: rank of place p is p // (s * b / N). In the canonical
layout each token is at the place of its own number.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Layout:
    """token_at: [s * b] int64, the token at each place; place_of: [s * b] int64, its inverse."""

    token_at: torch.Tensor
    place_of: torch.Tensor


def canonical(num_tokens: int, device) -> Layout:
    """Each of `num_tokens` tokens at the place of its own number."""
    numbers = torch.arange(num_tokens, device=device)
    return Layout(numbers, numbers)


def layout_of(owners: torch.Tensor) -> Layout:
    """[b, s] owners, equally many of each rank in every column -> the layout in which each rank holds its own.

    Each token stays in its column; a rank holds its tokens of a column in the order of the sequence.
    """
    columns = len(owners)
    positions = torch.argsort(owners, dim=1, stable=True)
    column = torch.arange(columns, device=owners.device)
    token_at = (positions.T * columns + column).reshape(-1)
    return Layout(token_at, inverse(token_at))


def inverse(permutation: torch.Tensor) -> torch.Tensor:
    """[n] int64 permutation -> its inverse."""
    numbers = torch.arange(len(permutation), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, numbers)


@dataclass(frozen=True, eq=False)
class RowMove:
    """One rank's part of the exchange between two layouts; n = s * b / N rows leave and arrive.

    new_place: [n] the place of each row of the shard in the new layout.
    send_order: [n] rows of the shard in the order in which they are sent, by receiver; send_place: its inverse.
    arrival_order: [n] rows of the new shard in the order in which they arrive, by sender; arrival_place: its
    inverse. sizes: [2, N] int64, rows to and from each rank, own ones included. All on the device.
    """

    new_place: torch.Tensor
    send_order: torch.Tensor
    send_place: torch.Tensor
    arrival_order: torch.Tensor
    arrival_place: torch.Tensor
    sizes: torch.Tensor


def plan_move(old: Layout, new: Layout, num_ranks: int, rank: int) -> RowMove:
    """What `rank` sends and receives when tokens go from `old` to `new`. No host synchronisation.

    Between two ranks rows travel in the order of their new places.
    """
    shard = len(old.token_at) // num_ranks
    mine = slice(rank * shard, (rank + 1) * shard)
    new_place = new.place_of[old.token_at[mine]]
    old_place = old.place_of[new.token_at[mine]]
    send_order = torch.argsort(new_place)
    arrival_order = torch.argsort(old_place // shard, stable=True)
    ranks = torch.arange(num_ranks, device=new_place.device)[:, None]
    sizes = torch.stack([(place // shard == ranks).sum(1) for place in (new_place, old_place)])
    return RowMove(new_place, send_order, inverse(send_order), arrival_order, inverse(arrival_order), sizes)
