"""Rows and bytes of a recorded routing at expert-parallel sizes that are not at hand: counted, not run."""

from dataclasses import dataclass

import numpy as np

from placement.rows import contiguous_expert_to_rank


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a hidden state, which travels out and back, and of what goes out with each assignment."""

    row: int
    probability: int
    tag: int


def counted(
    top_indices: np.ndarray, maps: np.ndarray, num_ranks: int, ranks_per_node: int, cost: RowBytes
) -> dict[str, float]:
    """Means over layers and tokens of a forward pass, dispatch and combine.

    top_indices: [layers, tokens, topk] experts; maps: [layers, E] physical_to_logical_map. Tokens lie on the ranks
    in equal consecutive shares (a remainder is left out), so a part of the rows stays where it is.

    Keys: `rows_{stock,per_rank,per_node}`, local ones included; `bytes_{stock,per_rank}` leaving a rank;
    `internode_bytes_{stock,per_rank,per_node}` leaving a node (per_node: the relay of two hops).
    """
    layers, tokens, topk = top_indices.shape
    tokens -= tokens % num_ranks
    source = np.repeat(np.arange(num_ranks), tokens // num_ranks)
    ranks = contiguous_expert_to_rank(maps.shape[1], num_ranks)
    totals = {}
    for experts, map_ in zip(top_indices[:, :tokens], maps, strict=True):
        expert_to_rank = np.empty(len(map_), dtype=np.int64)
        expert_to_rank[map_] = ranks
        for key, value in _layer(expert_to_rank[experts], source, num_ranks, ranks_per_node, cost).items():
            totals[key] = totals.get(key, 0) + value
    return {key: float(value) / (layers * tokens) for key, value in totals.items()}


def _layer(target: np.ndarray, source: np.ndarray, num_ranks: int, per_node: int, cost: RowBytes) -> dict:
    assignments = {"rank": (target != source[:, None]).sum()}
    assignments["node"] = (target // per_node != source[:, None] // per_node).sum()
    token = np.arange(len(target))[:, None]
    by_rank = np.zeros((len(target), num_ranks), dtype=bool)
    by_rank[token, target] = True
    by_node = by_rank.reshape(len(target), -1, per_node).any(2)
    rows = {"per_rank": by_rank.sum(), "per_node": by_node.sum()}
    by_rank[token[:, 0], source] = False
    rows_leaving_rank = by_rank.sum()
    of_node = by_rank.reshape(len(target), -1, per_node)
    of_node[token[:, 0], source // per_node] = False
    by_node[token[:, 0], source // per_node] = False
    stock, ours = cost.probability, cost.probability + cost.tag
    return {
        "rows_stock": target.size,
        "rows_per_rank": rows["per_rank"],
        "rows_per_node": rows["per_node"],
        "bytes_stock": assignments["rank"] * (2 * cost.row + stock),
        "bytes_per_rank": rows_leaving_rank * 2 * cost.row + assignments["rank"] * ours,
        "internode_bytes_stock": assignments["node"] * (2 * cost.row + stock),
        "internode_bytes_per_rank": of_node.sum() * 2 * cost.row + assignments["node"] * ours,
        "internode_bytes_per_node": by_node.sum() * 2 * cost.row + assignments["node"] * ours,
    }
