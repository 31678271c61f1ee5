"""Co-selection and the two searches: against slow twins, recounts and all placements of small cases."""

import numpy as np
import pytest
from placement_traces import coupled_routing, independent_routing

from placement.co_selection import co_selection, co_selection_reference, expert_counts, incidence, pearson
from placement.exhaustive import fewest_rows, num_partitions, partitions
from placement.layer_fit import fit_layer, load_limit
from placement.rows import contiguous_expert_to_rank, count_rows, rank_load
from placement.swap_search import (
    PairObjective,
    RowObjective,
    SumObjective,
    pair_search,
    row_search,
    search,
    search_reference,
)


def test_co_selection_equals_slow_twin():
    top_indices = independent_routing(1, 200, 12, 4)[0]
    assert np.array_equal(co_selection(top_indices, 12), co_selection_reference(top_indices, 12))


def test_pearson_of_a_matrix_with_itself_and_its_negative():
    matrix = co_selection(coupled_routing(1)[0], 16)
    assert pearson(matrix, matrix) == pytest.approx(1.0)
    assert pearson(matrix, -matrix) == pytest.approx(-1.0)


@pytest.mark.parametrize("num_experts, topk, ranks", [(16, 4, 4), (12, 3, 2), (16, 16, 4)])
def test_row_gains_equal_recounts_after_any_swaps(num_experts, topk, ranks):
    rng = np.random.default_rng(0)
    top_indices = independent_routing(1, 150, num_experts, topk)[0]
    selected = incidence(top_indices, num_experts)
    weights = rng.integers(1, 4, size=150).astype(np.float32)
    objective = RowObjective(selected, weights, contiguous_expert_to_rank(num_experts, ranks), ranks)
    for _ in range(40):
        first, second = rng.integers(num_experts, size=2)
        if objective.cluster[first] == objective.cluster[second]:
            continue
        gain, before = objective.gains()[first, second], objective.value()
        objective.swap(first, second)
        assert objective.value() - before == gain
    again = RowObjective(selected, weights, objective.cluster, ranks)
    different = objective.cluster[:, None] != objective.cluster[None, :]
    assert np.array_equal(objective.gains()[different], again.gains()[different])


def test_pair_gains_equal_recounts_after_any_swaps():
    rng = np.random.default_rng(0)
    matrix = co_selection(coupled_routing(1, topk=4)[0], 16)
    objective = PairObjective(matrix, contiguous_expert_to_rank(16, 4), 4)
    for _ in range(40):
        first, second = rng.integers(16, size=2)
        if objective.cluster[first] == objective.cluster[second]:
            continue
        gain, before = objective.gains()[first, second], objective.value()
        objective.swap(first, second)
        assert objective.value() - before == gain


def test_partitions_are_all_and_different():
    found = {tuple(ranks) for ranks in partitions(8, 4)}
    assert len(found) == num_partitions(8, 4) == 105


@pytest.mark.parametrize("topk, ranks", [(2, 2), (2, 4), (3, 2), (4, 4)])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("tolerance", [0.05, 0.0, np.inf])
def test_small_fits_reach_the_optimum(topk, ranks, seed, tolerance):
    top_indices = coupled_routing(1, 300, 8, topk, seed=seed, noise=0.4)[0]
    fitted = fit_layer(top_indices, 8, ranks, ranks, tolerance)
    best = fewest_rows(top_indices, 8, ranks, load_limit(top_indices, 8, ranks, tolerance))
    assert count_rows(top_indices, fitted) == count_rows(top_indices, best)


@pytest.mark.parametrize("kind", ["pairs", "rows", "both"])
@pytest.mark.parametrize("limited, nodes", [(False, 8), (True, 8), (True, 2)])
def test_search_equals_slow_twin(kind, limited, nodes):
    top_indices = coupled_routing(1, 800, 32, 3, noise=0.4)[0]
    ranks = contiguous_expert_to_rank(32, 8)
    limit = load_limit(top_indices, 32, 8, 0.05) if limited else None

    def objective():
        pairs = PairObjective(co_selection(top_indices, 32), ranks * nodes // 8, nodes)
        rows = RowObjective(incidence(top_indices, 32), None, ranks * nodes // 8, nodes)
        return {"pairs": pairs, "rows": rows, "both": SumObjective(rows, pairs)}[kind]

    allowed = np.random.default_rng(0).random((32, 32)) < 0.8
    allowed |= allowed.T
    found = search(objective(), ranks, 8, limit, allowed, depth=4)
    assert np.array_equal(found, search_reference(objective(), ranks, 8, limit, allowed))
    assert (found != ranks).any()


def test_rows_beat_pairs_where_the_two_objectives_differ():
    top_indices = coupled_routing(1, 2000, 32, 6, noise=0.3)[0]
    ranks = contiguous_expert_to_rank(32, 8)
    by_pairs = pair_search(co_selection(top_indices, 32), ranks, 8)
    by_rows = row_search(top_indices, by_pairs, 8)
    assert (
        count_rows(top_indices, by_rows) < count_rows(top_indices, by_pairs) < count_rows(top_indices, ranks)
    )


@pytest.mark.parametrize("tolerance", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("ranks_per_node", [8, 4, 2])
def test_load_limit_holds_on_the_fit_tokens(tolerance, ranks_per_node):
    rng = np.random.default_rng(0)
    popularity = rng.gumbel(size=32) + rng.gumbel(size=(1000, 32))
    top_indices = np.argsort(-popularity, axis=1)[:, :4]
    fitted = fit_layer(top_indices, 32, 8, ranks_per_node, tolerance)
    assert np.bincount(fitted).tolist() == [4] * 8
    contiguous = rank_load(top_indices, contiguous_expert_to_rank(32, 8), 8)
    assert rank_load(top_indices, fitted, 8) <= contiguous + tolerance + 1e-9


def test_experts_nobody_selects_find_a_place():
    top_indices = coupled_routing(1, 300, 8, 2)[0]
    fitted = fit_layer(top_indices, 16, 4, 4, 0.05)
    assert np.bincount(fitted).tolist() == [4] * 4
    assert expert_counts(top_indices, 16)[8:].sum() == 0


def test_nodes_come_first():
    top_indices = coupled_routing(1, 2000, 32, 4)[0]
    nodes = fit_layer(top_indices, 32, 8, 2, np.inf) // 2
    flat = fit_layer(top_indices, 32, 8, 8, np.inf) // 2
    assert count_rows(top_indices, nodes) < count_rows(top_indices, flat)
