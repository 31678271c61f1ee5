"""What a placement costs: rows sent and load per rank, counted on a routing trace.

A deduplicating dispatcher sends one row per distinct (token, destination rank), so a token costs as many
rows as ranks hold at least one of its experts. Stock all-to-all dispatch sends one row per selected expert.
"""

from dataclasses import dataclass
from math import comb

import numpy as np


def ranks_per_token(top_indices: np.ndarray, expert_to_rank: np.ndarray) -> np.ndarray:
    """[tokens, topk] experts, [num_experts] ranks -> [tokens] int64 number of distinct ranks per token."""
    ranks = np.asarray(expert_to_rank)[top_indices]
    if ranks.size and int(np.max(expert_to_rank)) < 64:
        masks = np.bitwise_or.reduce(np.uint64(1) << ranks.astype(np.uint64), axis=-1)
        return np.bitwise_count(masks).astype(np.int64)
    return ranks_per_token_reference(top_indices, expert_to_rank)


def ranks_per_token_reference(top_indices: np.ndarray, expert_to_rank: np.ndarray) -> np.ndarray:
    """Slow twin of `ranks_per_token`: sorts each token's ranks and counts where they change."""
    ranks = np.sort(np.asarray(expert_to_rank)[top_indices], axis=-1)
    if not ranks.size:
        return np.zeros(len(ranks), dtype=np.int64)
    return 1 + (ranks[:, 1:] != ranks[:, :-1]).sum(axis=-1)


def count_rows(top_indices: np.ndarray, expert_to_rank: np.ndarray) -> int:
    """Number of distinct (token, rank) pairs: rows that the deduplicating dispatcher sends."""
    return int(ranks_per_token(top_indices, expert_to_rank).sum())


def rows_removed(top_indices: np.ndarray, expert_to_rank: np.ndarray) -> float:
    """1 - rows / (tokens * topk), in [0, 1)."""
    return 1.0 - count_rows(top_indices, expert_to_rank) / top_indices.size


def rank_assignments(top_indices, expert_to_rank, expert_parallel_size: int) -> np.ndarray:
    """[expert_parallel_size] int64: token-expert assignments that each rank serves."""
    return np.bincount(
        np.asarray(expert_to_rank)[np.asarray(top_indices)].reshape(-1), minlength=expert_parallel_size
    )


def load_ratio(assignments: np.ndarray) -> float:
    """max / mean of assignments per rank; 1.0 when there are none."""
    mean = float(np.mean(assignments))
    return float(np.max(assignments)) / mean if mean else 1.0


def rank_load(top_indices, expert_to_rank, expert_parallel_size: int) -> float:
    """max over ranks / mean of token-expert assignments, at least 1.0."""
    return load_ratio(rank_assignments(top_indices, expert_to_rank, expert_parallel_size))


def contiguous_expert_to_rank(num_experts: int, expert_parallel_size: int) -> np.ndarray:
    """[num_experts] int64: the rank of each expert before any placement."""
    return np.arange(num_experts) // (num_experts // expert_parallel_size)


def expected_rows_per_token(num_experts: int, topk: int, expert_parallel_size: int) -> float:
    """Rows per token when each token takes a uniformly random set of experts.

    EP * (1 - C(E - n, k) / C(E, k)) with n = E / EP: the chance that a rank holds none of the k experts is
    the share of k-subsets that avoid its n experts.
    """
    local = num_experts // expert_parallel_size
    missed = comb(num_experts - local, topk) / comb(num_experts, topk)
    return expert_parallel_size * (1.0 - missed)


@dataclass
class RowCounter:
    """Counts one layer over a stream of token blocks in constant memory."""

    expert_to_rank: np.ndarray
    expert_parallel_size: int

    def __post_init__(self):
        self.num_rows = 0
        self.num_assignments = 0
        self.assignments = np.zeros(self.expert_parallel_size, dtype=np.int64)

    def add(self, top_indices: np.ndarray) -> None:
        """Counts another [tokens, topk] block."""
        self.num_rows += count_rows(top_indices, self.expert_to_rank)
        self.num_assignments += top_indices.size
        self.assignments += rank_assignments(top_indices, self.expert_to_rank, self.expert_parallel_size)

    @property
    def rows_removed(self) -> float:
        return 1.0 - self.num_rows / self.num_assignments

    @property
    def rank_load(self) -> float:
        return load_ratio(self.assignments)
