"""Kernighan-Lin passes over swaps of two experts, for any objective that can price every swap at once.

An objective offers `gains(experts)` -> [experts, num_experts] (gain of swapping experts a and b, larger is
better) and `swap(a, b)`, which changes only gains of experts in the two clusters. Two are here:
`PairObjective` (the paper's: co-selections inside a rank) and `RowObjective` (exact rows sent: distinct
(token, rank) pairs). They agree for topk = 2 only: m experts of a token on one rank save m - 1 rows but count
m (m - 1) / 2 pairs.
"""

from dataclasses import dataclass

import numpy as np

from placement.co_selection import incidence

_FORBIDDEN = np.float32(-np.inf)


@dataclass
class LoadLimit:
    """Keeps the heaviest rank at or under a limit, for one or several sets of tokens at once.

    `loads`: [sets, num_experts] assignments of each expert; `limits`: [sets] largest load of a rank. A swap
    that makes a rank heavier than a limit is not allowed.
    """

    loads: np.ndarray
    limits: np.ndarray

    def rank_loads(self, expert_to_rank: np.ndarray, num_ranks: int) -> np.ndarray:
        """[sets, num_ranks] assignments of each rank."""
        return np.stack([np.bincount(expert_to_rank, weights=w, minlength=num_ranks) for w in self.loads])

    def respected(self, expert_to_rank: np.ndarray, num_ranks: int) -> bool:
        """True when no rank is over a limit."""
        loads = self.rank_loads(expert_to_rank, num_ranks)
        return bool((loads.max(axis=1) <= self.limits + 1e-9).all())

    def largest(self, expert_to_rank: np.ndarray, num_ranks: int) -> np.ndarray:
        """[sets, num_experts]: the largest load that an expert may be replaced by on its rank."""
        room = self.limits[:, None] - self.rank_loads(expert_to_rank, num_ranks)
        return self.loads + room[:, expert_to_rank] + 1e-9

    def allowed(self, expert: int, largest: np.ndarray) -> np.ndarray:
        """[num_experts] bool: partners after a swap with which both ranks respect the limits."""
        fits = (self.loads <= largest[:, expert, None]) & (self.loads[:, expert, None] <= largest)
        return fits.all(axis=0)


class PairObjective:
    """Sum of W over pairs of experts in the same cluster. `cluster`: [num_experts] in 0 .. num_clusters-1."""

    def __init__(self, matrix: np.ndarray, cluster: np.ndarray, num_clusters: int):
        self.matrix = np.ascontiguousarray(matrix, dtype=np.float32)
        self.cluster = cluster.copy()
        members = np.zeros((len(cluster), num_clusters), dtype=np.float32)
        members[np.arange(len(cluster)), cluster] = 1.0
        self.to_cluster = self.matrix @ members

    def gains(self, experts=None) -> np.ndarray:
        experts = np.arange(len(self.cluster)) if experts is None else experts
        own = self.to_cluster[np.arange(len(self.cluster)), self.cluster]
        gains = self.to_cluster[experts][:, self.cluster] - own[experts, None]
        gains += self.to_cluster[:, self.cluster[experts]].T - own[None, :]
        gains -= 2.0 * self.matrix[experts]
        return gains

    def swap(self, first: int, second: int) -> None:
        p, q = self.cluster[first], self.cluster[second]
        change = self.matrix[:, second] - self.matrix[:, first]
        self.to_cluster[:, p] += change
        self.to_cluster[:, q] -= change
        self.cluster[first], self.cluster[second] = q, p

    def value(self) -> float:
        return float(self.to_cluster[np.arange(len(self.cluster)), self.cluster].sum() / 2.0)


class RowObjective:
    """Minus the (weighted) number of distinct (token, cluster) pairs.

    Moving expert a out of cluster p frees the row of each of its tokens that has nothing else on p
    (`freed[a]`); moving it into q costs a row for each of its tokens with nothing on q (`new[a, q]`). Tokens
    that hold both swapped experts keep their rows, so what was counted for them is taken back
    (`shared[a, b]`: tokens of a and b for which a is alone on its cluster).
    """

    def __init__(self, selected: np.ndarray, weights, cluster: np.ndarray, num_clusters: int):
        """`selected`: [tokens, num_experts] 0/1; `weights`: [tokens] or None for ones."""
        self.selected = selected
        self.by_expert = np.ascontiguousarray(selected.T) > 0
        ones = np.ones(len(selected), dtype=np.float32)
        self.weights = ones if weights is None else weights.astype(np.float32)
        weighted = selected * self.weights[:, None]
        self.cluster = cluster.copy()
        members = np.zeros((len(cluster), num_clusters), dtype=np.float32)
        members[np.arange(len(cluster)), cluster] = 1.0
        self.counts = selected @ members
        alone = weighted * (self.counts[:, cluster] == 1.0)
        self.freed = alone.sum(axis=0)
        self.new = weighted.T @ (self.counts == 0.0).astype(np.float32)
        self.shared = alone.T @ selected
        np.fill_diagonal(self.shared, 0.0)

    def gains(self, experts=None) -> np.ndarray:
        experts = np.arange(len(self.cluster)) if experts is None else experts
        gains = self.freed[experts, None] - self.new[experts][:, self.cluster] - self.shared[experts]
        gains += self.freed[None, :] - self.new[:, self.cluster[experts]].T - self.shared[:, experts].T
        return gains

    def swap(self, first: int, second: int) -> None:
        p, q = self.cluster[first], self.cluster[second]
        tokens = np.flatnonzero(self.by_expert[first] != self.by_expert[second])
        selected = self.selected[tokens]
        touched = np.flatnonzero((self.cluster == p) | (self.cluster == q))
        counts = self.counts[tokens]
        alone_before = counts[:, self.cluster[touched]] == 1.0
        empty_before = counts[:, [p, q]] == 0.0
        shift = selected[:, second] - selected[:, first]
        counts[:, p] += shift
        counts[:, q] -= shift
        self.counts[tokens] = counts
        self.cluster[first], self.cluster[second] = q, p
        alone_change = (counts[:, self.cluster[touched]] == 1.0).astype(np.float32) - alone_before
        empty_change = (counts[:, [p, q]] == 0.0).astype(np.float32) - empty_before
        weights = self.weights[tokens, None]
        change = selected[:, touched] * alone_change * weights
        self.new[:, [p, q]] += selected.T @ (empty_change * weights)
        self.freed[touched] += change.sum(axis=0)
        self.shared[touched] += change.T @ selected
        # Tokens with both experts keep their counts, but whether `first` is alone is now asked of q.
        self._recount_both(first, second)
        self.shared[first, first] = self.shared[second, second] = 0.0
        np.fill_diagonal(self.shared, 0.0)

    def _recount_both(self, first: int, second: int) -> None:
        both = np.flatnonzero(self.by_expert[first] & self.by_expert[second])
        if not len(both):
            return
        selected = self.selected[both]
        counts = self.counts[both]
        for expert, other in ((first, second), (second, first)):
            now, before = self.cluster[expert], self.cluster[other]
            change = (counts[:, now] == 1.0).astype(np.float32) - (counts[:, before] == 1.0)
            change *= self.weights[both]
            self.freed[expert] += change.sum()
            self.shared[expert] += change @ selected

    def value(self) -> float:
        return -float(self.weights @ (self.counts > 0.0).sum(axis=1))


class SumObjective:
    """The sum of two objectives over the same clusters, each swap made in both."""

    def __init__(self, first, second):
        self.first, self.second = first, second

    @property
    def cluster(self) -> np.ndarray:
        return self.first.cluster

    def gains(self, experts=None) -> np.ndarray:
        return self.first.gains(experts) + self.second.gains(experts)

    def swap(self, first: int, second: int) -> None:
        self.first.swap(first, second)
        self.second.swap(first, second)

    def value(self) -> float:
        return self.first.value() + self.second.value()


def search(objective, expert_to_rank, num_ranks, load_limit=None, allowed=None, max_passes=8, depth=None):
    """Improves a placement by Kernighan-Lin passes of swaps until a pass gains nothing.

    Each pass makes the best allowed swap again and again, also when it loses, each expert at most once,
    and keeps the best prefix. `expert_to_rank` ([num_experts], updated copy returned) is what the load limit
    sees; `objective.cluster` may be coarser (nodes). `allowed`: [E, E] bool, swaps to choose from.
    `depth`: losing swaps in a row after which a pass ends. Deterministic: ties go to the lowest pair.
    """
    expert_to_rank = expert_to_rank.copy()
    num_experts = len(expert_to_rank)
    depth = depth or max(4, num_experts // 16)
    for _ in range(max_passes):
        swaps, best_length, total, best_total = [], 0, 0.0, 0.0
        free = np.ones(num_experts, dtype=bool)
        gains = _usable_gains(objective, free, np.arange(num_experts), allowed)
        while len(swaps) - best_length < depth:
            first, second = _best_swap(gains, expert_to_rank, num_ranks, load_limit)
            if gains[first, second] == _FORBIDDEN:
                break
            total += float(gains[first, second])
            clusters = objective.cluster
            touched = (clusters == clusters[first]) | (clusters == clusters[second])
            _swap(objective, expert_to_rank, first, second)
            free[first] = free[second] = False
            touched = np.flatnonzero(touched & free)
            changed = _usable_gains(objective, free, touched, allowed)
            gains[touched], gains[:, touched] = changed, changed.T
            gains[[first, second]] = gains[:, [first, second]] = _FORBIDDEN
            swaps.append((first, second))
            if total > best_total + 1e-3:
                best_total, best_length = total, len(swaps)
        for first, second in reversed(swaps[best_length:]):
            _swap(objective, expert_to_rank, first, second)
        if not best_length:
            break
    return expert_to_rank


def _best_swap(gains, expert_to_rank, num_ranks, load_limit) -> tuple[int, int]:
    """The best swap that the limit allows; swaps it does not allow become minus infinity in `gains`.

    Whether a swap is allowed changes only with its own ranks, and then its gain is priced anew.
    """
    largest = None
    while True:
        first, second = divmod(int(np.argmax(gains)), len(gains))
        if load_limit is None or gains[first, second] == _FORBIDDEN:
            return first, second
        if largest is None:
            largest = load_limit.largest(expert_to_rank, num_ranks)
        allowed = load_limit.allowed(first, largest)
        if allowed[second]:
            return first, second
        gains[first, ~allowed] = _FORBIDDEN
        gains[~allowed, first] = _FORBIDDEN


def search_reference(objective, expert_to_rank, num_ranks, load_limit=None, allowed=None, depth=4):
    """Slow twin of `search`: prices every swap anew before each one."""
    expert_to_rank = expert_to_rank.copy()
    num_experts = len(expert_to_rank)
    for _ in range(8):
        swaps, totals, free = [], [0.0], np.ones(num_experts, dtype=bool)
        while len(swaps) - int(np.argmax(totals)) < depth:
            gains = _usable_gains(objective, free, np.arange(num_experts), allowed)
            if load_limit is not None:
                largest = load_limit.largest(expert_to_rank, num_ranks)
                within = [load_limit.allowed(expert, largest) for expert in range(num_experts)]
                gains = np.where(within, gains, _FORBIDDEN)
            first, second = divmod(int(np.argmax(gains)), num_experts)
            if gains[first, second] == _FORBIDDEN:
                break
            _swap(objective, expert_to_rank, first, second)
            free[[first, second]] = False
            swaps.append((first, second))
            totals.append(totals[-1] + float(gains[first, second]))
        kept = int(np.argmax(totals))
        for first, second in reversed(swaps[kept:]):
            _swap(objective, expert_to_rank, first, second)
        if not kept:
            break
    return expert_to_rank


def _usable_gains(objective, free, experts, allowed) -> np.ndarray:
    """[experts, num_experts] gains, minus infinity for swaps not to choose from; the limit not asked."""
    usable = objective.cluster[experts, None] != objective.cluster[None, :]
    usable &= free[experts, None] & free[None, :]
    if allowed is not None:
        usable &= allowed[experts]
    return np.where(usable, objective.gains(experts), _FORBIDDEN)


def _swap(objective, expert_to_rank, first, second):
    objective.swap(first, second)
    expert_to_rank[first], expert_to_rank[second] = expert_to_rank[second], expert_to_rank[first]


def pair_search(matrix, expert_to_rank, num_ranks, load_limit=None, **options) -> np.ndarray:
    """Kernighan-Lin on the co-selection matrix. Returns the new expert_to_rank."""
    objective = PairObjective(matrix, expert_to_rank, num_ranks)
    return search(objective, expert_to_rank, num_ranks, load_limit, **options)


def row_search(
    top_indices, expert_to_rank, num_ranks, load_limit=None, weights=None, **options
) -> np.ndarray:
    """Kernighan-Lin on exact row counts of [tokens, topk]. Returns the new expert_to_rank."""
    selected = incidence(top_indices, len(expert_to_rank))
    objective = RowObjective(selected, weights, expert_to_rank, num_ranks)
    return search(objective, expert_to_rank, num_ranks, load_limit, **options)
