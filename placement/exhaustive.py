"""Every placement of a few experts: the reference that searches are held against."""

from itertools import combinations
from math import factorial

import numpy as np

from placement.rows import count_rows


def num_partitions(num_experts: int, num_ranks: int) -> int:
    """Ways to split the experts into unlabelled ranks of equal size."""
    local = num_experts // num_ranks
    return factorial(num_experts) // (factorial(local) ** num_ranks * factorial(num_ranks))


def partitions(num_experts: int, num_ranks: int):
    """Yields expert_to_rank of every split, whatever its ranks are called: the lowest free expert opens a rank."""
    local = num_experts // num_ranks
    expert_to_rank = np.full(num_experts, -1, dtype=np.int64)

    def place(rank: int):
        free = np.flatnonzero(expert_to_rank < 0)
        if not len(free):
            yield expert_to_rank.copy()
            return
        for others in combinations(free[1:], local - 1):
            members = [free[0], *others]
            expert_to_rank[members] = rank
            yield from place(rank + 1)
            expert_to_rank[members] = -1

    yield from place(0)


def fewest_rows(top_indices: np.ndarray, num_experts: int, num_ranks: int, load_limit=None) -> np.ndarray:
    """expert_to_rank with the fewest rows among all that respect the limit; the first of equals.

    `load_limit`: a `LoadLimit` or None. Cost grows with `num_partitions`. Raises ValueError when none
    respects the limit.
    """
    best, best_rows = None, None
    for expert_to_rank in partitions(num_experts, num_ranks):
        if load_limit is not None and not load_limit.respected(expert_to_rank, num_ranks):
            continue
        rows = count_rows(top_indices, expert_to_rank)
        if best is None or rows < best_rows:
            best, best_rows = expert_to_rank, rows
    if best is None:
        raise ValueError(f"no placement keeps every rank under {load_limit.limits.tolist()} assignments")
    return best
