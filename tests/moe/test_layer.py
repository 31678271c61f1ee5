"""One real MoE layer on four processes at EP 2 and 4: see layer_worker.py for the cases."""

import json
from pathlib import Path

import pytest

from tests.launching import launch

WORKER = Path(__file__).with_name("layer_worker.py")
BF16_STEP = 2.0**-8


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer")
    launch(folder, 4, [folder], script=(str(WORKER),), timeout=500).check()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def dispatched(results):
    for rank, of_rank in enumerate(results):
        for case, result in of_rank.items():
            if isinstance(result, dict):
                yield f"{case}, rank {rank}", result


def test_every_rank_ran_every_case(results):
    assert all(len(of_rank) == 69 for of_rank in results)


def test_rows_sent_are_the_distinct_pairs(results):
    for case, result in dispatched(results):
        assert result["rows"] == result["pairs"], case
        assert result["assignments"] == result["selected"], case


def test_two_hops_send_one_row_to_a_node(results):
    checked = 0
    for case, result in dispatched(results):
        if result["hops"] is not None:
            assert result["hops"] == result["expected_hops"], case
            checked += 1
    assert checked == 4 * 13


def test_repeating_and_recomputing_give_the_same_bits(results):
    for case, result in dispatched(results):
        assert result["repeat"] == [], case
        assert result["recompute"] == [], case


def test_recomputed_forwards_count_once_and_evaluation_never(results):
    for case, result in dispatched(results):
        assert result["counted_three_times"], case
        assert result["evaluation_not_counted"], case


def test_within_twice_the_error_of_plain_bf16(results):
    """Output and all gradients, against a dense fp32 layer."""
    compared = 0
    for case, result in dispatched(results):
        for name, error in result.get("error", {}).items():
            assert error <= 2 * result["stock_error"][name], (case, name)
            compared += 1
    assert compared == 4 * 6 * 5 * 5


def test_close_to_stock_where_there_is_no_dense_twin(results):
    """Dropping, padding, shared experts, groups: the same sums in another order."""
    for case, result in dispatched(results):
        for name, difference in result["against_stock"].items():
            assert difference <= BF16_STEP, (case, name)


def test_two_partial_sums_have_the_bits_of_stock(results):
    """With top-2 every sum over a token's rows has two terms, and one order.

    Over two hops an expert's rows come relay by relay, so that its weight gradients add them in another order:
    whether a bit shows depends on the processor.
    """
    for case, result in dispatched(results):
        if case.startswith("top2"):
            differing = {name for name, difference in result["against_stock"].items() if difference}
            assert differing <= ({"fc1", "fc2"} if "two hops" in case else set()), case


def test_placement_in_front_of_stock_dispatchers_changes_no_bit(results):
    for of_rank in results:
        for case, differing in of_rank.items():
            if case.startswith("stock"):
                assert differing == [], case
