"""Which experts are selected after the same experts: what a group must have in common to be predicted.

Token shuffling sends a token where its experts of the two MoE layers before let expect the next ones. That
works as far as experts that follow the same experts share a rank, whether or not one token selects both.
"""

import numpy as np

from placement.co_selection import expert_counts
from placement.prediction import SINGLE_PRIOR, token_matrix

_PARTS = 8


def predictable_pairs(top_indices: np.ndarray, evidence: np.ndarray, num_experts: int) -> np.ndarray:
    """S[e, e'] = how much more often than by chance one is selected where the other is expected.

    `top_indices`: [tokens, topk]; `evidence`: [layers, tokens, topk] experts of the same tokens in layers
    before. [num_experts, num_experts] float32, symmetric, zero diagonal, in units of co-selections. With
    q[t, e], how much more than its mean e is expected of token t (mean over the token's evidence of
    single-expert tables, drawn towards the mean by `SINGLE_PRIOR` pseudo-tokens), and y[t, e], 1 where t
    selects e: S = q^T y + y^T q, q and y each taken from its mean over all tokens. The tables of each of eight
    consecutive parts are counted on the other seven, so that text does not predict itself.
    """
    num_tokens = len(top_indices)
    parts = np.array_split(np.arange(num_tokens), _PARTS)
    ones = np.ones(top_indices.size, dtype=np.float32)
    selected = token_matrix(top_indices, ones, num_experts)
    loads = expert_counts(top_indices, num_experts)
    matrix = np.zeros((num_experts, num_experts), dtype=np.float32)
    expected = np.zeros(num_experts, dtype=np.float32)
    for experts in evidence:
        given = token_matrix(experts, ones, num_experts)
        counts, tokens = (given.T @ selected).toarray(), expert_counts(experts, num_experts)
        for part in parts:
            # Few experts meet in a part, so its counts stay sparse: products with them cost next to nothing.
            counts_of_part = (given[part].T @ selected[part]).tocsr()
            tokens_of_part = expert_counts(experts[part], num_experts).astype(np.float32)
            of_others = loads - expert_counts(top_indices[part], num_experts)
            mean = (of_others / max(1, num_tokens - len(part))).astype(np.float32)
            seen = (tokens - tokens_of_part)[:, None]
            table = (counts - counts_of_part.toarray() + SINGLE_PRIOR * mean) / (seen + SINGLE_PRIOR) - mean
            # Sums over the part's tokens of y q^T and of q.
            matrix += counts_of_part.T @ table.astype(np.float32)
            expected += tokens_of_part @ table
    matrix -= np.outer(loads / num_tokens, expected)
    matrix = (matrix + matrix.T) / np.float32(len(evidence) * evidence.shape[2])
    np.fill_diagonal(matrix, 0.0)
    return matrix


def predictable_pairs_reference(top_indices, evidence, num_experts: int) -> np.ndarray:
    """Slow twin of `predictable_pairs`: one token after the other, in fp64."""
    num_tokens = len(top_indices)
    expected = np.zeros((num_tokens, num_experts))
    selected = np.zeros((num_tokens, num_experts))
    for token, experts in enumerate(top_indices):
        selected[token, experts] = 1.0
    for part in np.array_split(np.arange(num_tokens), _PARTS):
        others = np.setdiff1d(np.arange(num_tokens), part)
        mean = selected[others].sum(axis=0) / max(1, len(others))
        for token in part:
            predictions = []
            for layer in evidence:
                for expert in layer[token]:
                    after = selected[others[(layer[others] == expert).any(axis=1)]]
                    drawn = (after.sum(axis=0) + SINGLE_PRIOR * mean) / (len(after) + SINGLE_PRIOR)
                    predictions.append(drawn - mean)
            expected[token] = np.mean(predictions, axis=0)
    matrix = (expected - expected.mean(axis=0)).T @ (selected - selected.mean(axis=0))
    matrix = matrix + matrix.T
    np.fill_diagonal(matrix, 0.0)
    return matrix
