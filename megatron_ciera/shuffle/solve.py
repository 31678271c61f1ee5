"""From the evidence of two MoE layers to a layout and the exchange towards it: one function on one device.

The result is one packed tensor, so that a GPU can replay the whole computation as one graph.
"""

from dataclasses import dataclass

import torch

from megatron_ciera.shuffle.layout import Layout, RowMove, canonical, layout_of, plan_move
from megatron_ciera.shuffle.owners import assign, spilled
from megatron_ciera.shuffle.tables import ScoreTables


@dataclass(frozen=True)
class Shape:
    """num_tokens: of all ranks, s * b; columns: b; rank: the one that the move is planned for."""

    num_tokens: int
    columns: int
    num_ranks: int
    rank: int

    @property
    def shard(self) -> int:
        return self.num_tokens // self.num_ranks


@dataclass(frozen=True, eq=False)
class Solution:
    """spilled: int64 scalar, tokens that are not on the rank they score highest on."""

    layout: Layout
    move: RowMove
    spilled: torch.Tensor


def solve(
    tables: ScoreTables | None,
    previous: torch.Tensor | None,
    before: torch.Tensor | None,
    old: Layout,
    shape: Shape,
) -> torch.Tensor:
    """Packed solution, int64. previous, before: [T, k] experts of all tokens one and two MoE layers before.

    Without tables the new layout is canonical. Integers and fp64 that is exact: the same on every rank. No host
    synchronisation.
    """
    if tables is None:
        layout = canonical(shape.num_tokens, old.token_at.device)
        count = layout.token_at.new_zeros(1)
    else:
        scores = tables.scores(previous, before)
        by_column = scores.view(-1, shape.columns, scores.shape[1]).permute(1, 2, 0).contiguous()
        owners = assign(by_column)
        layout, count = layout_of(owners), spilled(by_column, owners).view(1)
    move = plan_move(old, layout, shape.num_ranks, shape.rank)
    orders = (move.new_place, move.send_order, move.send_place, move.arrival_order, move.arrival_place)
    return torch.cat([layout.token_at, layout.place_of, *orders, move.sizes.view(-1), count])


def unpack(packed: torch.Tensor, shape: Shape) -> Solution:
    """Views of what `solve` packed."""
    parts = packed.split([shape.num_tokens] * 2 + [shape.shard] * 5 + [shape.num_ranks * 2, 1])
    token_at, place_of, *orders, sizes, count = parts
    return Solution(Layout(token_at, place_of), RowMove(*orders, sizes.view(2, -1)), count[0])
