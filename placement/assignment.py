"""Who owns which token: every rank exactly its share of the tokens, as near as possible to their experts."""

import numpy as np

_PRICE_ROUNDS = 24


def capacities(num_tokens: int, num_ranks: int) -> np.ndarray:
    """[num_ranks] tokens each rank owns: T / EP, the first T % EP ranks one more."""
    return num_tokens // num_ranks + (np.arange(num_ranks) < num_tokens % num_ranks)


def canonical_owners(num_tokens: int, num_ranks: int) -> np.ndarray:
    """[num_tokens] owner by position: consecutive tokens, as sequence parallelism splits them."""
    return np.repeat(np.arange(num_ranks), capacities(num_tokens, num_ranks))


def assign_owners(
    scores: np.ndarray, confidence: np.ndarray | None = None, prices: bool = True
) -> np.ndarray:
    """[tokens, ranks] scores -> [tokens] int64 owners, exactly `capacities` tokens a rank.

    `scores`: expected assignments of the token on each rank (higher is better). Prices on crowded ranks come
    first (the dual of the transport problem, a fixed number of steps), so that a token that loses little by
    moving moves; then tokens are taken in decreasing `confidence` (default: best minus second best priced
    score) to their most preferred rank with room, in at most `ranks` rounds of sort-and-take, ties by token
    index. Deterministic.
    """
    num_tokens, num_ranks = scores.shape
    room = capacities(num_tokens, num_ranks)
    scores = np.asarray(scores, dtype=np.float64)
    if prices and num_tokens:
        scores = scores - crowding_prices(scores, room)
    if confidence is None:
        best = np.partition(scores, num_ranks - 2, axis=1) if num_ranks > 1 else scores
        confidence = best[:, -1] - best[:, -2] if num_ranks > 1 else best[:, 0]
    owners = np.full(num_tokens, -1, dtype=np.int64)
    waiting = np.argsort(-confidence, kind="stable")
    for _ in range(num_ranks):
        if not len(waiting):
            break
        wanted = np.where(room > 0, scores[waiting], -np.inf).argmax(axis=1)
        by_rank = np.argsort(wanted, kind="stable")
        place_in_line = np.empty(len(waiting), dtype=np.int64)
        counts = np.bincount(wanted, minlength=num_ranks)
        starts = np.cumsum(counts) - counts
        place_in_line[by_rank] = np.arange(len(waiting)) - starts[wanted[by_rank]]
        taken = place_in_line < room[wanted]
        owners[waiting[taken]] = wanted[taken]
        room = room - np.bincount(wanted[taken], minlength=num_ranks)
        waiting = waiting[~taken]
    return owners


def crowding_prices(scores: np.ndarray, room: np.ndarray, rounds: int = _PRICE_ROUNDS) -> np.ndarray:
    """[ranks] prices after which about `room` tokens prefer each rank.

    Each round moves every price to where exactly `room` tokens would still prefer its rank at the others'
    prices, half-way (all ranks at once), which settles without oscillating.
    """
    prices = np.zeros(scores.shape[1])
    num_tokens = len(scores)
    for _ in range(rounds):
        priced = scores - prices
        top = np.partition(priced, -2, axis=1)[:, -2:] if scores.shape[1] > 1 else None
        if top is None:
            return prices
        best, second = top[:, 1], top[:, 0]
        others = np.where(priced == best[:, None], second[:, None], best[:, None])
        advantage = priced - others
        for rank, wanted in enumerate(room):
            if 0 < wanted < num_tokens:
                threshold = np.partition(advantage[:, rank], num_tokens - wanted)[num_tokens - wanted]
                prices[rank] += 0.5 * threshold
    return prices - prices.min()


def assign_owners_reference(scores: np.ndarray, confidence: np.ndarray) -> np.ndarray:
    """Slow twin of the sort-and-take rounds of `assign_owners` (prices off): one token after the other."""
    num_tokens, num_ranks = scores.shape
    room = capacities(num_tokens, num_ranks)
    owners = np.full(num_tokens, -1, dtype=np.int64)
    while (owners < 0).any():
        open_ranks = np.flatnonzero(room > 0)
        left = room.copy()
        for token in np.argsort(-confidence, kind="stable"):
            if owners[token] >= 0:
                continue
            rank = open_ranks[scores[token, open_ranks].argmax()]
            if left[rank] > 0:
                owners[token] = rank
                left[rank] -= 1
        room = left
    return owners


def locality(top_indices: np.ndarray, expert_to_rank: np.ndarray, owners: np.ndarray) -> float:
    """Share of [tokens, topk] assignments whose expert is on the rank that owns the token."""
    return float((np.asarray(expert_to_rank)[top_indices] == owners[:, None]).mean())
