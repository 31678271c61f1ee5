"""Fits one MoE layer: pair search, then exact rows, under the load limit; nodes first where there are several."""

import numpy as np

from placement.co_selection import co_selection, expert_counts, incidence
from placement.predictability import predictable_pairs
from placement.rows import contiguous_expert_to_rank, load_ratio
from placement.swap_search import LoadLimit, PairObjective, RowObjective, SumObjective, search

_FEW_EXPERTS = 32
_VARIETY_BLOCK = 256
_AGREEMENT_PARTS = {2: 8}
_DEFAULT_AGREEMENT_PARTS = 4
_AGREEMENT_POWER = 0.7
_PREDICTABLE_WEIGHT = 8.0
_LOAD_PARTS = 4
_PART_SLACK = 0.25


def to_physical_map(expert_to_rank: np.ndarray, num_local_experts: int) -> np.ndarray:
    """[num_experts] ranks -> physical_to_logical_map, experts in ascending order within a rank."""
    order = np.argsort(expert_to_rank, kind="stable")
    counts = np.bincount(expert_to_rank)
    if not (counts == num_local_experts).all():
        raise ValueError(f"experts per rank are {counts.tolist()}, wanted {num_local_experts} on each")
    return order.astype(np.int64)


def load_limit(top_indices, num_experts: int, expert_parallel_size: int, tolerance: float):
    """The LoadLimit of one layer: contiguous max/mean + tolerance on these tokens; None for infinity.

    Beyond 32 experts and top-2 each of four consecutive parts of the tokens has a limit of its own, 0.25
    wider, so that experts that are popular in the same text do not gather on one rank.
    """
    if np.isinf(tolerance):
        return None
    parts = [top_indices]
    if num_experts > _FEW_EXPERTS and top_indices.shape[1] > 2 and len(top_indices) >= _LOAD_PARTS:
        parts += np.array_split(top_indices, _LOAD_PARTS)
    loads = np.array([expert_counts(part, num_experts) for part in parts], dtype=np.float64)
    per_rank = loads.reshape(len(parts), expert_parallel_size, -1).sum(axis=2)
    ratios = np.array([load_ratio(part) for part in per_rank])
    slack = np.where(np.arange(len(parts)) > 0, _PART_SLACK, 0.0)
    return LoadLimit(loads, (ratios + tolerance + slack) * per_rank.mean(axis=1))


def variety_weights(top_indices: np.ndarray, num_experts: int) -> np.ndarray:
    """[tokens] float32, mean 1: less for text that is common in the fit tokens, more for what is rare.

    A few thousand tokens come from a few documents, and documents alike say the same thing several times.
    Each block of 256 tokens is weighted by the inverse square of how much its expert loads resemble those of
    all blocks (correlation of square roots of loads, negative ones as none).
    """
    size = _VARIETY_BLOCK
    num_blocks = len(top_indices) // size
    if num_blocks < 2:
        return np.ones(len(top_indices), dtype=np.float32)
    blocks = [top_indices[start * size : (start + 1) * size] for start in range(num_blocks)]
    loads = np.sqrt([expert_counts(block, num_experts) for block in blocks])
    loads -= loads.mean(axis=1, keepdims=True)
    loads /= np.maximum(np.linalg.norm(loads, axis=1, keepdims=True), 1e-9)
    alike = np.maximum(loads @ loads.T, 0.0).sum(axis=1)
    per_block = np.maximum(alike, 1e-3) ** -2.0
    place = np.minimum(np.arange(len(top_indices)) // size, num_blocks - 1)
    weights = per_block[place]
    return (weights / weights.mean()).astype(np.float32)


def agreeing_pairs(top_indices: np.ndarray, num_experts: int) -> np.ndarray:
    """Co-selection in which pairs that several parts of the tokens agree on count more than those of one.

    [num_experts, num_experts] float32: sum over consecutive parts (eight for top-2, else four) of
    count ** 0.7, scaled to the same total as the counts.
    """
    num_parts = _AGREEMENT_PARTS.get(top_indices.shape[1], _DEFAULT_AGREEMENT_PARTS)
    parts = [co_selection(part, num_experts) for part in np.array_split(top_indices, num_parts)]
    matrix = sum(part**_AGREEMENT_POWER for part in parts)
    total = float(sum(part.sum() for part in parts))
    return (matrix * (total / max(float(matrix.sum()), 1.0))).astype(np.float32)


def fit_layer(
    top_indices: np.ndarray,
    num_experts: int,
    expert_parallel_size: int,
    ranks_per_node: int,
    load_tolerance: float,
    seed: int = 0,
    num_starts: int | None = None,
    evidence: np.ndarray | None = None,
) -> np.ndarray:
    """[tokens, topk] experts -> [num_experts] ranks, exactly num_experts / expert_parallel_size on each.

    Searches from contiguous placement and from `num_starts - 1` shuffled ones (default: `_default_starts`)
    and keeps the one that is best by the objective, to nodes first where there are several.

    Up to 32 experts the objective is the row count itself. Beyond, the tokens are too few for it: pairs are
    counted by `agreeing_pairs`; that is all for top-2, where pairs are rows; for more experts a token a
    second search gains on the sum of pairs and rows weighted by `variety_weights`.

    `evidence`: [layers, tokens, topk] experts of the same tokens in the layers that token shuffling predicts
    from. Where `uses_evidence`, pairs that are selected after the same experts count as well
    (`predictable_pairs`, times 8).
    """
    topk = top_indices.shape[1]
    limit = load_limit(top_indices, num_experts, expert_parallel_size, load_tolerance)
    few = num_experts <= _FEW_EXPERTS
    matrix = co_selection(top_indices, num_experts) if few else agreeing_pairs(top_indices, num_experts)
    if evidence is not None and uses_evidence(num_experts, topk):
        matrix = matrix + _PREDICTABLE_WEIGHT * predictable_pairs(top_indices, evidence, num_experts)
    selected = weights = None
    if few or topk > 2:
        selected = incidence(top_indices, num_experts)
        weights = None if few else variety_weights(top_indices, num_experts)
    contiguous = contiguous_expert_to_rank(num_experts, expert_parallel_size)
    rng = np.random.default_rng(seed)
    best, best_value = contiguous, None
    for start in range(num_starts or _default_starts(num_experts, topk)):
        ranks = contiguous if not start else _shuffled(contiguous, limit, rng)
        ranks, value = _search_levels(matrix, selected, weights, ranks, ranks_per_node, limit)
        if best_value is None or value > best_value:
            best, best_value = ranks, value
    return best


def uses_evidence(num_experts: int, topk: int) -> bool:
    """Whether `fit_layer` looks at the layers before: for top-2 of more than 32 experts."""
    return topk == 2 and num_experts > _FEW_EXPERTS


def _default_starts(num_experts: int, topk: int) -> int:
    if num_experts <= _FEW_EXPERTS:
        return 8
    return 4 if topk == 2 else 1


def _shuffled(expert_to_rank: np.ndarray, limit, rng) -> np.ndarray:
    """A far away placement that respects the limit: random swaps, each allowed by it."""
    ranks = expert_to_rank.copy()
    num_ranks = int(ranks.max()) + 1
    loads = None if limit is None else limit.rank_loads(ranks, num_ranks)
    for first, second in rng.integers(len(ranks), size=(4 * len(ranks), 2)):
        p, q = ranks[first], ranks[second]
        if limit is not None:
            growth = limit.loads[:, second] - limit.loads[:, first]
            if (loads[:, p] + growth > limit.limits).any() or (loads[:, q] - growth > limit.limits).any():
                continue
            loads[:, p] += growth
            loads[:, q] -= growth
        ranks[first], ranks[second] = q, p
    return ranks


def _search_levels(matrix, selected, weights, ranks, ranks_per_node: int, limit):
    """Swaps between nodes for the best clusters of nodes, then inside nodes for the best ranks.

    Returns (ranks, objective values: nodes before ranks where there are several nodes).
    """
    num_ranks = int(ranks.max()) + 1
    num_nodes = num_ranks // ranks_per_node
    if num_nodes == 1:
        ranks, value = _search_both(matrix, selected, weights, ranks, ranks, num_ranks, limit, None)
        return ranks, (value,)
    nodes = ranks // ranks_per_node
    ranks, of_nodes = _search_both(matrix, selected, weights, ranks, nodes, num_nodes, limit, None)
    nodes = ranks // ranks_per_node
    same_node = nodes[:, None] == nodes[None, :]
    ranks, value = _search_both(matrix, selected, weights, ranks, ranks, num_ranks, limit, same_node)
    return ranks, (of_nodes, value)


def _search_both(matrix, selected, weights, expert_to_rank, cluster, num_clusters, limit, allowed):
    """Pair search, then (unless `selected` is None) rows, with weights: rows and pairs.

    Clusters are nodes or ranks; the limit always acts on ranks. Returns (ranks, value of the last objective).
    """
    num_ranks = int(expert_to_rank.max()) + 1
    objective = pairs = PairObjective(matrix, cluster, num_clusters)
    ranks = search(pairs, expert_to_rank, num_ranks, limit, allowed)
    if selected is not None:
        objective = RowObjective(selected, weights, pairs.cluster, num_clusters)
        objective = objective if weights is None else SumObjective(objective, pairs)
        ranks = search(objective, ranks, num_ranks, limit, allowed)
    return ranks, objective.value()
