"""Counted rows and bytes against python sets."""

import numpy as np
import pytest

from megatron_ciera.moe.traffic import RowBytes, counted


def by_sets(top_indices, maps, num_ranks, per_node, cost):
    """Every row and assignment one at a time."""
    layers, tokens, topk = top_indices.shape
    local = maps.shape[1] // num_ranks
    totals = dict.fromkeys(counted(top_indices, maps, num_ranks, per_node, cost), 0)
    for layer in range(layers):
        slot = {expert: slot for slot, expert in enumerate(maps[layer].tolist())}
        for token in range(tokens):
            mine = token * num_ranks // tokens
            ranks = [slot[expert] // local for expert in top_indices[layer, token].tolist()]
            away = [rank for rank in ranks if rank != mine]
            abroad = [rank for rank in ranks if rank // per_node != mine // per_node]
            row, out = 2 * cost.row, cost.probability + cost.tag
            totals["rows_stock"] += topk
            totals["rows_per_rank"] += len(set(ranks))
            totals["rows_per_node"] += len({rank // per_node for rank in ranks})
            totals["bytes_stock"] += len(away) * (row + cost.probability)
            totals["bytes_per_rank"] += len(set(away)) * row + len(away) * out
            totals["internode_bytes_stock"] += len(abroad) * (row + cost.probability)
            totals["internode_bytes_per_rank"] += len(set(abroad)) * row + len(abroad) * out
            nodes = {rank // per_node for rank in abroad}
            totals["internode_bytes_per_node"] += len(nodes) * row + len(abroad) * out
    return {key: value / (layers * tokens) for key, value in totals.items()}


@pytest.mark.parametrize(("num_ranks", "per_node"), [(2, 2), (4, 2), (8, 4), (8, 8)])
def test_counted(num_ranks, per_node):
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((2, 40, 16)), axis=2)[..., :5]
    maps = np.stack([rng.permutation(16) for _ in range(2)])
    cost = RowBytes(row=100, probability=4, tag=1)
    expected = by_sets(experts, maps, num_ranks, per_node, cost)
    assert counted(experts, maps, num_ranks, per_node, cost) == pytest.approx(expected, rel=1e-12)
