"""Prediction tables: to which ranks a token's experts of the next MoE layer will lie, from the two before.

For layer l+1 a token's evidence is each pair (expert at layer l, expert at layer l-1) that it selected. A
pair predicts by its own counts, drawn towards the two single-expert tables by `PAIR_PRIOR` pseudo-tokens; a
pair never seen, or not among the `MAX_PAIRS` most frequent of the layer, predicts by the single-expert tables
alone, and those are drawn towards the layer's mean by `SINGLE_PRIOR` pseudo-tokens. The token's score on a
rank is the mean over its pairs: the expected number of its assignments there. The first two MoE layers are
not predicted.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from scipy.sparse import csr_matrix

from placement.assignment import assign_owners, canonical_owners, locality
from placement.rows import contiguous_expert_to_rank, count_rows

SINGLE_PRIOR = 5.0
PAIR_PRIOR = 4.0
MAX_PAIRS = 16384
BLOCK_TOKENS = 8192


@dataclass(frozen=True, eq=False)
class LayerTables:
    """Tables that predict one layer.

    `previous`, `before`: [num_experts, ranks] float32, expected assignments on each rank of a token that
    selected the expert one, two MoE layers before.
    `pair_keys`: [pairs] int64 ascending, expert one layer before * num_experts + expert two layers before;
    `pair_tables`: [pairs, ranks] float32. `chance`: [ranks] float32, mean over tokens.
    `held_out_locality`, `held_out_chance`: share of assignments on the predicted owner with tables from one
    half of the fit tokens on the other half, and the same by position.
    """

    previous: np.ndarray
    before: np.ndarray
    pair_keys: np.ndarray
    pair_tables: np.ndarray
    chance: np.ndarray
    held_out_locality: float
    held_out_chance: float

    @property
    def num_ranks(self) -> int:
        return self.previous.shape[1]


def rank_counts(top_indices: np.ndarray, expert_to_rank: np.ndarray, num_ranks: int) -> np.ndarray:
    """[tokens, topk] -> [tokens, ranks] float32: assignments of each token on each rank."""
    tokens = np.arange(len(top_indices))
    counts = np.zeros((len(top_indices), num_ranks), dtype=np.float32)
    for column in np.asarray(expert_to_rank)[top_indices].T:
        counts[tokens, column] += 1.0
    return counts


def predict(tables: LayerTables, previous: np.ndarray, before: np.ndarray):
    """(scores [tokens, ranks] float32, confidence [tokens] float32) of the predicted layer.

    `previous`, `before`: [tokens, topk] experts one and two MoE layers before. Scores are expected
    assignments on each rank; confidence is the best score minus the second best.
    """
    single = (tables.previous[previous].mean(axis=1) + tables.before[before].mean(axis=1)) / 2.0
    scores = single + _pair_corrections(tables, _pair_keys(previous, before, len(tables.previous)))
    best = np.partition(scores, scores.shape[1] - 2, axis=1)
    return scores, best[:, -1] - best[:, -2]


def predict_reference(tables: LayerTables, previous, before) -> np.ndarray:
    """Slow twin of `predict`'s scores: one token and one pair at a time."""
    num_experts = len(tables.previous)
    rows = {int(key): row for row, key in enumerate(tables.pair_keys)}
    scores = np.zeros((len(previous), tables.num_ranks))
    for token, experts in enumerate(previous):
        predictions = []
        for first in experts:
            for second in before[token]:
                row = rows.get(int(first) * num_experts + int(second))
                fallback = (tables.previous[first] + tables.before[second]) / 2.0
                predictions.append(fallback if row is None else tables.pair_tables[row])
        scores[token] = np.mean(predictions, axis=0)
    return scores


def fit_layer_tables(
    top_indices, index: int, expert_to_rank, num_experts: int, num_ranks: int
) -> LayerTables:
    """Tables for row `index` >= 2 of [layers, tokens, topk], with their accuracy on held-out halves."""
    args = (expert_to_rank, num_experts, num_ranks)
    half = top_indices.shape[1] // 2
    correct, chance = [], []
    for fit_part, other in ((slice(None, half), slice(half, None)), (slice(half, None), slice(None, half))):
        tables = _fit_tables(top_indices[:, fit_part], index, *args)
        predicted, by_position = layer_locality(tables, top_indices[:, other], index, expert_to_rank)
        correct.append(predicted)
        chance.append(by_position)
    fitted = _fit_tables(top_indices, index, *args)
    return LayerTables(*fitted, float(np.mean(correct)), float(np.mean(chance)))


def layer_locality(tables, top_indices: np.ndarray, index: int, expert_to_rank) -> tuple[float, float]:
    """(predicted, by position): share of assignments on the token's owner, all tokens one block."""
    if not isinstance(tables, LayerTables):
        tables = LayerTables(*tables, 0.0, 0.0)
    owners = owners_by_prediction(tables, top_indices, index)
    by_position = canonical_owners(len(owners), tables.num_ranks)
    return (
        locality(top_indices[index], expert_to_rank, owners),
        locality(top_indices[index], expert_to_rank, by_position),
    )


def owners_by_prediction(tables: LayerTables, top_indices: np.ndarray, index: int) -> np.ndarray:
    """[tokens] owners at row `index` of one block of [layers, tokens, topk], exact capacity."""
    scores, _ = predict(tables, top_indices[index - 1], top_indices[index - 2])
    return assign_owners(scores)


def _fit_tables(top_indices, index, expert_to_rank, num_experts, num_ranks):
    target = rank_counts(top_indices[index], expert_to_rank, num_ranks)
    chance = target.mean(axis=0)
    previous = _single_table(top_indices[index - 1], target, chance, num_experts)
    before = _single_table(top_indices[index - 2], target, chance, num_experts)
    keys = _pair_keys(top_indices[index - 1], top_indices[index - 2], num_experts)
    keys, where, counts = np.unique(keys.reshape(-1), return_inverse=True, return_counts=True)
    often = np.sort(np.argsort(-counts, kind="stable")[:MAX_PAIRS])
    where = where.reshape(top_indices.shape[1], -1)
    sums = (token_matrix(where, np.ones(where.size), len(keys)).T @ target)[often]
    keys, counts = keys[often], counts[often][:, None]
    fallback = (previous[keys // num_experts] + before[keys % num_experts]) / 2.0
    pair_tables = (sums + PAIR_PRIOR * fallback) / (counts + PAIR_PRIOR)
    return previous, before, keys, pair_tables.astype(np.float32), chance


def _pair_keys(previous: np.ndarray, before: np.ndarray, num_experts: int) -> np.ndarray:
    """[tokens, topk * topk] int64: key of every pair of a token's experts in two layers."""
    keys = previous[:, :, None].astype(np.int64) * num_experts + before[:, None, :]
    return keys.reshape(len(previous), -1)


def _single_table(experts, target, chance, num_experts) -> np.ndarray:
    counts = np.bincount(experts.reshape(-1), minlength=num_experts)[:, None]
    sums = token_matrix(experts, np.ones(experts.size), num_experts).T @ target
    return ((sums + SINGLE_PRIOR * chance) / (counts + SINGLE_PRIOR)).astype(np.float32)


def _pair_corrections(tables: LayerTables, keys: np.ndarray) -> np.ndarray:
    """[tokens, ranks]: mean over a token's pairs of what known pairs predict beyond their single tables."""
    if not len(tables.pair_keys):
        return np.zeros((len(keys), tables.num_ranks), dtype=np.float32)
    num_experts = len(tables.previous)
    first, second = tables.pair_keys // num_experts, tables.pair_keys % num_experts
    corrections = tables.pair_tables - (tables.previous[first] + tables.before[second]) / 2.0
    place = np.searchsorted(tables.pair_keys, keys)
    place[place == len(tables.pair_keys)] = 0
    known = tables.pair_keys[place] == keys
    weights = known.reshape(-1).astype(np.float32) / keys.shape[1]
    return token_matrix(place, weights, len(tables.pair_keys)) @ corrections


def token_matrix(columns: np.ndarray, weights: np.ndarray, num_columns: int):
    """Sparse [tokens, num_columns] with `weights` ([tokens * width]) at `columns` ([tokens, width])."""
    tokens, width = columns.shape
    starts = np.arange(0, tokens * width + 1, width)
    return csr_matrix((weights, columns.reshape(-1), starts), shape=(tokens, num_columns))


def window_of(top_indices: np.ndarray, index: int, layer_id) -> np.ndarray | None:
    """Rows index - 2 .. index of [layers, tokens, topk]: what layer `index` is predicted from, and itself.

    None for layers that are not predicted: the first two and MTP layers.
    """
    predicted = index >= 2 and layer_id.block == "decoder"
    return top_indices[index - 2 : index + 1] if predicted else None


def rows_when_shuffled(
    fit_window: np.ndarray, window: np.ndarray, expert_to_rank, num_experts: int, num_ranks: int
) -> int:
    """Rows sent by `window` when its tokens move to owners predicted from `fit_window`: all but those at home.

    Windows: [3, tokens, topk], see `window_of`; the tokens of `window` are one block.
    """
    tables = LayerTables(*_fit_tables(fit_window, 2, expert_to_rank, num_experts, num_ranks), 0.0, 0.0)
    owners = owners_by_prediction(tables, window, 2)
    at_home = (expert_to_rank[window[2]] == owners[:, None]).any(axis=1)
    return count_rows(window[2], expert_to_rank) - int(at_home.sum())


def fit_tables(top_indices: np.ndarray, placement, num_workers: int = 1) -> list[LayerTables | None]:
    """Tables for the layers of a placement fitted on the same [layers, tokens, topk].

    None for the first two layers, which lack layers before them, and for MTP layers. `num_workers`: forked
    processes.
    """
    jobs = []
    for index, layer in enumerate(placement.layers):
        window = window_of(top_indices, index, layer.layer_id)
        sizes = (placement.num_experts, placement.expert_parallel_size)
        jobs.append(None if window is None else (window, placement.expert_to_rank(index), *sizes))
    if num_workers <= 1:
        return [_fit_job(job) for job in jobs]
    with ProcessPoolExecutor(num_workers, mp_context=get_context("fork")) as pool:
        return list(pool.map(_fit_job, jobs))


def _fit_job(job) -> LayerTables | None:
    if job is None:
        return None
    window, *arguments = job
    return fit_layer_tables(window, 2, *arguments)


class LocalityCounter:
    """Locality of all layers over a stream, in blocks of 8,192 tokens with exact capacity each."""

    def __init__(self, placement, tables: list[LayerTables | None]):
        self.placement, self.tables = placement, tables
        self.contiguous = contiguous_expert_to_rank(placement.num_experts, placement.expert_parallel_size)
        self.sums = np.zeros((len(tables), 2))
        self.num_assignments = 0
        self.rest = None

    def add(self, top_indices: np.ndarray) -> None:
        """Counts [layers, tokens, topk]; tokens short of a block wait for the next call."""
        if self.rest is not None:
            top_indices = np.concatenate([self.rest, top_indices], axis=1)
        whole = top_indices.shape[1] // BLOCK_TOKENS * BLOCK_TOKENS
        for start in range(0, whole, BLOCK_TOKENS):
            self._count(top_indices[:, start : start + BLOCK_TOKENS])
        self.rest = top_indices[:, whole:]

    def results(self) -> list[tuple[float, float] | None]:
        """Per layer (locality by position with contiguous experts, locality predicted); None without tables."""
        if self.rest is not None and self.rest.shape[1]:
            self._count(self.rest)
            self.rest = None
        return [
            None if layer is None else tuple(sums / self.num_assignments)
            for layer, sums in zip(self.tables, self.sums, strict=True)
        ]

    def _count(self, block: np.ndarray) -> None:
        num_ranks = self.placement.expert_parallel_size
        by_position = canonical_owners(block.shape[1], num_ranks)
        size = block[0].size
        for index, tables in enumerate(self.tables):
            if tables is None:
                continue
            owners = owners_by_prediction(tables, block, index)
            ranks = self.placement.expert_to_rank(index)
            self.sums[index] += size * np.array(
                [locality(block[index], self.contiguous, by_position), locality(block[index], ranks, owners)]
            )
        self.num_assignments += size
