"""Row counts against a slow twin, hand counts and the closed form of independent routing."""

import numpy as np
import pytest
from placement_traces import independent_routing

from placement.rows import (
    RowCounter,
    contiguous_expert_to_rank,
    count_rows,
    expected_rows_per_token,
    load_ratio,
    rank_load,
    ranks_per_token,
    ranks_per_token_reference,
    rows_removed,
)


def test_hand_counted_rows():
    top_indices = np.array([[0, 1, 4], [0, 4, 6], [6, 7, 4]])
    ranks = contiguous_expert_to_rank(8, 4)
    assert ranks_per_token(top_indices, ranks).tolist() == [2, 3, 2]
    assert count_rows(top_indices, ranks) == 7
    assert rows_removed(top_indices, ranks) == pytest.approx(1 - 7 / 9)
    assert rank_load(top_indices, ranks, 4) == pytest.approx(3 / (9 / 4))


@pytest.mark.parametrize("num_experts, ranks", [(16, 4), (128, 64), (256, 128)])
def test_fast_count_equals_slow_twin(num_experts, ranks):
    top_indices = independent_routing(1, 500, num_experts, 6)[0]
    expert_to_rank = contiguous_expert_to_rank(num_experts, ranks)
    fast = ranks_per_token(top_indices, expert_to_rank)
    assert np.array_equal(fast, ranks_per_token_reference(top_indices, expert_to_rank))


@pytest.mark.parametrize("topk, ranks", [(2, 8), (6, 8), (6, 32), (8, 16)])
def test_closed_form_of_independent_routing(topk, ranks):
    top_indices = independent_routing(1, 20000, 128, topk)[0]
    counts = ranks_per_token(top_indices, contiguous_expert_to_rank(128, ranks))
    error = counts.std() / np.sqrt(len(counts))
    assert abs(counts.mean() - expected_rows_per_token(128, topk, ranks)) < 4 * error


def test_closed_form_known_values():
    assert 1 - expected_rows_per_token(128, 2, 8) / 2 == pytest.approx(0.059, abs=5e-4)
    assert 1 - expected_rows_per_token(128, 6, 32) / 6 == pytest.approx(0.058, abs=5e-4)


def test_counter_over_blocks_equals_one_count():
    top_indices = independent_routing(1, 1000, 16, 3)[0]
    ranks = contiguous_expert_to_rank(16, 4)
    counter = RowCounter(ranks, 4)
    for start in (0, 1, 700):
        counter.add(top_indices[start : {0: 1, 1: 700, 700: 1000}[start]])
    assert counter.rows_removed == rows_removed(top_indices, ranks)
    assert counter.rank_load == rank_load(top_indices, ranks, 4)
    assert counter.num_assignments == 3000


def test_load_ratio_on_a_hand_made_matrix():
    assert load_ratio(np.array([6, 2, 2, 2])) == 2.0
    assert load_ratio(np.zeros(4)) == 1.0
