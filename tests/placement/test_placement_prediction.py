"""Prediction tables, capacity-exact owners and their files."""

import numpy as np
import pytest
from placement_traces import coupled_routing, independent_routing

from placement import Placement, fit, prediction
from placement.assignment import (
    assign_owners,
    assign_owners_reference,
    canonical_owners,
    capacities,
    locality,
)
from placement.prediction import LocalityCounter, fit_tables, predict, predict_reference, rank_counts
from placement.table_file import load_tables, save_tables


def chained_routing(layers=4, tokens=4096, num_experts=16, seed=0):
    """Each layer selects a fixed image of the experts of the layer before, mostly."""
    rng = np.random.default_rng(seed)
    routing = [coupled_routing(1, tokens, num_experts, 2, seed)[0]]
    for _ in range(layers - 1):
        following = rng.permutation(num_experts)[routing[-1]]
        noise = independent_routing(1, tokens, num_experts, 2, seed)[0]
        routing.append(np.where(rng.random((tokens, 1)) < 0.8, following, noise).astype(np.int32))
    return np.stack(routing)


@pytest.mark.parametrize("tokens, ranks", [(64, 8), (61, 8), (3, 8), (0, 4), (50, 1)])
@pytest.mark.parametrize("prices", [True, False])
def test_every_rank_owns_its_exact_share(tokens, ranks, prices):
    scores = np.random.default_rng(0).random((tokens, ranks))
    scores[:, 0] += 5.0
    owners = assign_owners(scores, prices=prices)
    assert np.array_equal(np.bincount(owners, minlength=ranks), capacities(tokens, ranks))


@pytest.mark.parametrize("seed", range(5))
def test_rounds_equal_slow_twin(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 4, size=(40, 4)).astype(float)
    confidence = rng.integers(0, 3, size=40).astype(float)
    assert np.array_equal(
        assign_owners(scores, confidence, prices=False), assign_owners_reference(scores, confidence)
    )


def test_prices_come_near_the_best_assignment():
    from scipy.optimize import linear_sum_assignment

    rng = np.random.default_rng(0)
    scores = rng.random((64, 4)) + np.array([0.5, 0.2, 0.0, 0.0])
    tokens, slots = linear_sum_assignment(-np.repeat(scores, 16, axis=1))
    best = scores[tokens, slots // 16].sum()
    priced = scores[np.arange(64), assign_owners(scores)].sum()
    plain = scores[np.arange(64), assign_owners(scores, prices=False)].sum()
    assert plain < priced <= best + 1e-9
    assert priced > 0.98 * best


def test_canonical_owners_are_consecutive():
    assert canonical_owners(8, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_rank_counts_and_locality_by_hand():
    top_indices, ranks = np.array([[0, 1], [1, 3]]), np.array([0, 0, 1, 1])
    assert rank_counts(top_indices, ranks, 2).tolist() == [[2, 0], [1, 1]]
    assert locality(top_indices, ranks, np.array([0, 1])) == 0.75


def test_predict_equals_slow_twin():
    routing = chained_routing(tokens=512)
    placement = fit(routing, 4)
    tables = fit_tables(routing, placement)
    assert tables[0] is None and tables[1] is None and len(tables[2].pair_keys)
    scores, confidence = predict(tables[3], routing[2, :50], routing[1, :50])
    expected = predict_reference(tables[3], routing[2, :50], routing[1, :50])
    assert np.allclose(scores, expected, atol=1e-5)
    ordered = np.sort(scores, axis=1)
    assert np.array_equal(confidence, ordered[:, -1] - ordered[:, -2])


def test_most_frequent_pairs_are_kept(monkeypatch):
    routing = chained_routing(tokens=512)
    placement = fit(routing, 4)
    whole = fit_tables(routing, placement)[2]
    monkeypatch.setattr(prediction, "MAX_PAIRS", 20)
    kept = fit_tables(routing, placement)[2]
    places = np.searchsorted(whole.pair_keys, kept.pair_keys)
    assert len(kept.pair_keys) == 20 < len(whole.pair_keys)
    assert np.array_equal(whole.pair_tables[places], kept.pair_tables)
    keys, counts = np.unique(routing[1][:, :, None] * 16 + routing[0][:, None, :], return_counts=True)
    assert counts[np.isin(keys, kept.pair_keys)].min() >= counts[~np.isin(keys, kept.pair_keys)].max()


def test_tables_predict_unseen_tokens_and_know_when_they_cannot():
    routing = chained_routing(tokens=8192)
    placement = fit(routing[:, :4096], 4)
    tables = fit_tables(routing[:, :4096], placement, num_workers=2)
    counter = LocalityCounter(placement, tables)
    for start in (4096, 5000, 8000):
        counter.add(routing[:, start : {4096: 5000, 5000: 8000, 8000: 8192}[start]])
    results = counter.results()
    assert results[0] is None and results[2][1] > 0.6 > 0.3 > results[2][0]
    assert tables[3].held_out_locality > 0.6
    unrelated = np.concatenate([coupled_routing(1, 4096, seed=s) for s in range(3)])
    weak = fit_tables(unrelated, fit(unrelated, 4))[2]
    assert abs(weak.held_out_locality - weak.held_out_chance) < 0.03


def test_tables_round_trip_and_refusals(tmp_path):
    routing = chained_routing(tokens=512)
    placement = fit(routing, 4)
    tables = fit_tables(routing, placement)
    save_tables(tmp_path / "p.npz", tables, placement)
    loaded = load_tables(tmp_path / "p.npz", placement)
    assert loaded[0] is None
    for name in ("previous", "before", "pair_keys", "pair_tables", "chance"):
        assert np.array_equal(getattr(loaded[2], name), getattr(tables[2], name))
    assert loaded[2].held_out_locality == tables[2].held_out_locality
    assert load_tables(tmp_path / "none.npz", placement) is None
    other = Placement.contiguous([layer.layer_id for layer in placement.layers], 16, 2, 4)
    with pytest.raises(ValueError, match="p.npz: found those of another placement than this one, wanted"):
        load_tables(tmp_path / "p.npz", other)
    (tmp_path / "p.npz").write_bytes((tmp_path / "p.npz").read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged"):
        load_tables(tmp_path / "p.npz", placement)
