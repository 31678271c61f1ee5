"""Which experts the same token selects: the co-selection matrix and what it says about coupling."""

import numpy as np


def incidence(top_indices: np.ndarray, num_experts: int) -> np.ndarray:
    """[tokens, topk] experts -> [tokens, num_experts] float32, 1 where the token selects the expert."""
    matrix = np.zeros((len(top_indices), num_experts), dtype=np.float32)
    np.put_along_axis(matrix, np.asarray(top_indices, dtype=np.int64), 1.0, axis=1)
    return matrix


def co_selection(top_indices: np.ndarray, num_experts: int, weights: np.ndarray | None = None) -> np.ndarray:
    """W[e, e'] = (weighted) number of tokens that select both; symmetric float32, zero diagonal.

    Counts are exact up to 2^24 tokens (float32 integers).
    """
    selected = incidence(top_indices, num_experts)
    weighted = selected if weights is None else selected * weights[:, None].astype(np.float32)
    matrix = weighted.T @ selected
    np.fill_diagonal(matrix, 0.0)
    return matrix


def co_selection_reference(top_indices, num_experts: int) -> np.ndarray:
    """Slow twin of `co_selection`: one pair at a time."""
    matrix = np.zeros((num_experts, num_experts), dtype=np.float32)
    for experts in np.asarray(top_indices):
        for position, first in enumerate(experts):
            for second in experts[position + 1 :]:
                matrix[first, second] += 1
                matrix[second, first] += 1
    return matrix


def expert_counts(top_indices: np.ndarray, num_experts: int) -> np.ndarray:
    """[num_experts] int64: tokens that select each expert."""
    return np.bincount(np.asarray(top_indices).reshape(-1), minlength=num_experts)


def pearson(first: np.ndarray, second: np.ndarray) -> float:
    """Pearson correlation of two co-selection matrices over distinct pairs; nan when one is constant."""
    upper = np.triu_indices(len(first), 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.corrcoef(first[upper], second[upper])[0, 1])


def next_expert_shares(current: np.ndarray, following: np.ndarray, num_experts: int) -> np.ndarray:
    """[num_experts] largest share of an expert's tokens that go to one expert of the next layer.

    `current` and `following`: [tokens, topk] of the same tokens at two successive MoE layers. Experts
    without tokens get nan.
    """
    counts = incidence(current, num_experts).T @ incidence(following, num_experts)
    tokens = expert_counts(current, num_experts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(tokens > 0, counts.max(axis=1) / tokens, np.nan)
