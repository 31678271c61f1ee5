"""Fits one MoE layer: pair search, then exact rows, under the load limit; nodes first where there are "
"several."""

import numpy as np

from placement.co_selection import co_selection, expert_counts, incidence
from placement.rows import contiguous_expert_to_rank, load_ratio
from placement.swap_search import LoadLimit, PairObjective, RowObjective, search


def to_physical_map(expert_to_rank: np.ndarray, num_local_experts: int) -> np.ndarray:
    """[num_experts] ranks -> physical_to_logical_map, experts in ascending order within a rank."""
    order = np.argsort(expert_to_rank, kind="stable")
    counts = np.bincount(expert_to_rank)
    if not (counts == num_local_experts).all():
        raise ValueError(f"experts per rank are {counts.tolist()}, wanted {num_local_experts} on each")
    return order.astype(np.int64)


def load_limit(top_indices, num_experts: int, expert_parallel_size: int, tolerance: float):
    """The LoadLimit of one layer: contiguous max/mean + tolerance on these tokens; None for infinity."""
    if np.isinf(tolerance):
        return None
    loads = expert_counts(top_indices, num_experts).astype(np.float64)
    contiguous = contiguous_expert_to_rank(num_experts, expert_parallel_size)
    per_rank = np.bincount(contiguous, weights=loads, minlength=expert_parallel_size)
    return LoadLimit(loads, (load_ratio(per_rank) + tolerance) * per_rank.mean())


def fit_layer(
    top_indices: np.ndarray,
    num_experts: int,
    expert_parallel_size: int,
    ranks_per_node: int,
    load_tolerance: float,
    seed: int = 0,
) -> np.ndarray:
    """[tokens, topk] experts -> [num_experts] ranks, exactly num_experts / expert_parallel_size on each."""
    limit = load_limit(top_indices, num_experts, expert_parallel_size, load_tolerance)
    matrix = co_selection(top_indices, num_experts)
    selected = incidence(top_indices, num_experts)
    ranks = contiguous_expert_to_rank(num_experts, expert_parallel_size)
    num_nodes = expert_parallel_size // ranks_per_node
    if num_nodes > 1:
        ranks = _search_both(matrix, selected, ranks, ranks // ranks_per_node, num_nodes, limit, None)

    def same_node(current):
        nodes = current // ranks_per_node
        return nodes[:, None] == nodes[None, :]

    return _search_both(
        matrix, selected, ranks, ranks, expert_parallel_size, limit, same_node if num_nodes > 1 else None
    )


def _search_both(matrix, selected, expert_to_rank, cluster, num_clusters, limit, allowed):
    """Pair search, then exact rows, over clusters (nodes or ranks); the limit always acts on ranks."""
    num_ranks = int(expert_to_rank.max()) + 1
    pairs = PairObjective(matrix, cluster, num_clusters)
    ranks = search(pairs, expert_to_rank, num_ranks, limit, allowed)
    rows = RowObjective(selected, None, pairs.cluster, num_clusters)
    return search(rows, ranks, num_ranks, limit, allowed)
