"""The HTML report, the synthetic generator and the comparison partitioner."""

import numpy as np
import pytest
from placement_traces import coupled_routing

from placement import cli_fit, fit_layers
from placement.layer_fit import fit_layer
from placement.report import rank_traffic, rows_per_token, seconds_per_token
from placement.rows import contiguous_expert_to_rank, count_rows, rows_removed
from placement.synthetic import pair_statistics, synthetic_routing


def test_traffic_totals_equal_rows():
    top_indices = coupled_routing(1, 64)[0]
    ranks = contiguous_expert_to_rank(16, 4)
    traffic = rank_traffic(top_indices, ranks, 4)
    assert traffic.sum() == count_rows(top_indices, ranks)
    within, across = rows_per_token(top_indices, ranks, 4, 2)
    assert within + across == pytest.approx((traffic.sum() - np.trace(traffic)) / 64)


def test_time_is_bytes_over_the_slower_link():
    cluster = {"intra_node": {"bandwidth_gb_s": 100}, "inter_node": {"bandwidth_gb_s": 10}}
    assert seconds_per_token((2.0, 0.0), cluster, 500) == pytest.approx(2 * 1000 / 100e9)
    assert seconds_per_token((2.0, 1.0), cluster, 500) == pytest.approx(1000 / 10e9)


def test_report_is_one_whole_page(tmp_path):
    pytest.importorskip("matplotlib")
    np.savez(tmp_path / "r.npz", top_indices=coupled_routing(3, 1024, num_experts=8))
    config = tmp_path / "c.yaml"
    config.write_text("cluster: {gpu: X, intra_node: {bandwidth_gb_s: 9}, inter_node: {bandwidth_gb_s: 1}}")
    arguments = [str(tmp_path / "r.npz"), "--expert-parallel-size", "4", "--num-tokens", "1024"]
    arguments += ["--output", str(tmp_path / "p.json"), "--report", str(tmp_path / "r.html")]
    assert cli_fit.main([*arguments, "--config", str(config)]) == 0
    page = (tmp_path / "r.html").read_text()
    for section in (
        "Rows removed",
        "Rank load",
        "Traffic",
        "Prediction",
        "Expected gain on X",
        "Co-selection",
    ):
        assert f"<h2>{section}" in page
    assert page.count("data:image/png;base64,") >= 7 and "http" not in page
    config.write_text("megatron: {}")
    (tmp_path / "p.json").unlink()
    assert cli_fit.main([*arguments, "--config", str(config)]) == 2
    assert not (tmp_path / "p.json").exists()


def test_synthetic_top2_has_the_statistics_of_the_paper():
    routing = synthetic_routing(3, 12288, 2)
    found = pair_statistics(routing[0, 4096:])
    assert found["top_pairs"] == pytest.approx(0.42, abs=0.03)
    assert found["confident_pairs"] == pytest.approx(14, abs=5)
    assert found["confident_tokens"] == pytest.approx(0.16, abs=0.04)


@pytest.mark.parametrize("topk, ranks, removed", [(2, 8, 0.265), (6, 8, 0.58), (6, 32, 0.351)])
def test_synthetic_fits_remove_what_the_paper_reports(topk, ranks, removed):
    tokens = synthetic_routing(1, 8192, topk)[0]
    fitted = fit_layer(tokens[:4096], 128, ranks, ranks, 0.05)
    assert rows_removed(tokens[4096:], fitted) == pytest.approx(removed, abs=0.03)


def test_search_is_no_worse_than_mt_kahypar():
    pytest.importorskip("mtkahypar")
    from placement.partitioner import mt_kahypar_ranks

    tokens = coupled_routing(1, 2000, 32, 4, noise=0.4)[0]
    theirs = mt_kahypar_ranks(tokens, 32, 4)
    ours = fit_layer(tokens, 32, 4, 4, np.inf)
    assert count_rows(tokens, ours) <= 1.01 * count_rows(tokens, theirs)


def test_hundred_experts_are_fitted_in_seconds():
    routing = synthetic_routing(2, 4096, 6)
    result = fit_layers(routing, 8, num_experts=128)
    assert all(layer.changed for layer in result.layers)
