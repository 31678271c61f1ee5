import json
from itertools import combinations

import pytest

from megatron_ciera.cluster import Cluster, Link
from megatron_ciera.errors import ConfigurationError
from megatron_ciera.simulator.features import (
    ChangeRates,
    parse_features,
    rates_at,
    rates_from_stability,
    routing,
)
from megatron_ciera.simulator.network import Cost, Group, all_to_all, ring, strided
from placement.rows import expected_rows_per_token

CLUSTER = Cluster("CPU", 2, 8, 1.0, Link(200.0, 2.0), Link(10.0, 5.0))


def test_uniform_rows_is_the_mean_over_all_expert_sets():
    sets = list(combinations(range(8), 3))
    counted = sum(len({expert // 2 for expert in chosen}) for chosen in sets) / len(sets)
    assert expected_rows_per_token(8, 3, 4) == pytest.approx(counted)


def test_rows_removed_by_contiguous_placement_are_those_of_the_paper():
    removed = {(k, ep): 1 - expected_rows_per_token(128, k, ep) / k for k in (2, 6) for ep in (8, 32)}
    assert removed[6, 8] == pytest.approx(0.25, abs=0.006)
    assert removed[6, 32] == pytest.approx(0.055, abs=0.004)
    assert removed[2, 8] == pytest.approx(0.06, abs=0.002)


@pytest.mark.parametrize(("topk", "ranks", "removed"), [(6, 8, 0.58), (6, 32, 0.351), (2, 8, 0.265)])
def test_placement_assumption_meets_the_papers_points(topk, ranks, removed):
    rows = routing(128, topk, ranks, parse_features("placement")).rows
    assert 1 - rows / topk == pytest.approx(removed, abs=0.003)


def test_each_feature_sends_fewer_rows():
    remote = [
        routing(128, 6, 16, parse_features(name)).remote
        for name in ("stock", "dedup", "placement", "shuffle")
    ]
    assert remote == sorted(remote, reverse=True)
    assert remote[0] == pytest.approx(6 * 15 / 16)
    assert routing(128, 6, 16, parse_features("placement"), rows_removed=0.5).rows == 3.0


def test_change_rates_meet_the_measurements():
    for rate, bits in ((3.9e-4, 3.88), (1.2e-4, 2.12), (6.0e-5, 1.31)):
        assert rates_at(rate).bits("delta", "expert") == pytest.approx(bits + 0.05)
    # At pretraining rates nearly every block changes: 10.55 bits.
    assert rates_at(3.9e-4).bits("exponent-reuse", "dense") == pytest.approx(10.6, abs=0.1)
    assert rates_at(1e-9).bits("delta", "dense") == rates_at(6.0e-5).bits("delta", "dense")


def test_smaller_blocks_change_less_often():
    bits = [rates_at(1e-4, size).bits("exponent-reuse", "expert") for size in (64, 512, 4096)]
    assert bits == sorted(bits)


def test_rates_from_a_stability_report(tmp_path):
    measured = {
        "block_change_rate": {"64": 0.4, "256": 0.9},
        "bits_per_value": {"exponent_reuse": 10.0, "delta": 3.0, "delta_packed": 4.0},
    }
    expert = {
        "block_change_rate": {"64": 0.1, "256": 0.3},
        "bits_per_value": {"exponent_reuse": 9.0, "delta": 2.0, "delta_packed": 3.0},
    }
    report = json.loads(json.dumps({"total": measured, "classes": {"expert": expert, "attention": measured}}))
    rates = rates_from_stability(report, "here")
    assert rates == ChangeRates({"expert": 2.0, "dense": 3.0}, {"expert": 0.3, "dense": 0.9}, 256, "here")
    assert rates_from_stability(report, "here", 64).block_change_rate == {"expert": 0.1, "dense": 0.4}
    with pytest.raises(
        ConfigurationError, match="--block-size: found 512, needs one that here measured: 64, 256"
    ):
        rates_from_stability(report, "here", 512)


def test_a_measured_ratio_is_that_of_either_codec():
    rates = rates_at(1e-4).with_ratio(0.5)
    assert rates.bits("delta", "dense") == rates.bits("exponent-reuse", "expert") == 8


def test_feature_words():
    both = parse_features("ciera+shuffle")
    assert (both.codec, both.dedup, both.placement, both.shuffle) == ("delta", True, True, True)
    paper = parse_features("exponent-reuse+no-selection+no-overlap")
    assert (paper.codec, paper.selection, paper.overlap) == ("exponent-reuse", False, False)
    assert parse_features("stock").codec is None
    with pytest.raises(ConfigurationError, match="--features: found cierra"):
        parse_features("cierra")


def test_ring_inside_a_node_and_across():
    assert ring(CLUSTER, Group(8, 8), 800) == Cost(7 * 2e-6, 700.0, 0.0)
    # Sixteen ranks, eight a node: the NICs of a node share what enters it.
    across = ring(CLUSTER, Group(16, 8), 1600)
    assert (across.intra, across.inter) == (1500.0, 1500.0 / 8)
    assert across.seconds == pytest.approx(7 * 2e-6 + 5e-6)
    twice = ring(CLUSTER, Group(2, 1), 100, rounds=2)
    assert (twice.intra, twice.inter) == (0.0, 100.0)
    assert ring(CLUSTER, Group(1, 1), 100) == Cost()


def test_all_to_all_by_level():
    cost = all_to_all(CLUSTER, Group(16, 8), 1500.0)
    assert (cost.intra, cost.inter) == (pytest.approx(700.0), pytest.approx(800.0))
    assert all_to_all(CLUSTER, Group(4, 4), 300.0) == Cost(2e-6, 300.0, 0.0)


def test_reductions_and_all_to_alls_at_their_own_rates():
    link = Link(8.0, 1.0, reduce_gb_s=4.0, all_to_all_gb_s=2.0)
    cluster = Cluster("CPU", 2, 1, 1.0, Link(16.0, 1.0), link)
    pair = strided(2, 1, 1)
    seconds = [
        cost.alone(cluster) - 1e-6
        for cost in (
            ring(cluster, pair, 16e9),
            ring(cluster, pair, 16e9, reduces=True),
            ring(cluster, pair, 16e9, rounds=2, reduces=True),
            all_to_all(cluster, pair, 8e9),
        )
    ]
    assert seconds == pytest.approx([1.0, 2.0, 4.0, 4.0], rel=1e-5)


def test_strided_groups():
    assert strided(16, 1, 8) == Group(16, 8)
    assert strided(4, 4, 8) == Group(4, 2)
    assert strided(4, 16, 8) == Group(4, 1)
