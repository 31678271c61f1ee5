"""When a run fits, what it fits from, whether a move repays, and how few experts move."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ciera.moe import fit_process
from megatron_ciera.moe.fit_process import FitAnswer, FitRequest
from megatron_ciera.moe.moves import fewest_moves
from megatron_ciera.moe.recorder import RouteRecorder
from megatron_ciera.moe.refit import MoveCost, Refit, worthwhile
from megatron_ciera.moe.schedule import FitSchedule
from placement.file import DECODER, LayerId
from placement.fit import NoGainError


@pytest.mark.parametrize(
    ("first", "interval", "started_at", "was_fitted", "expected"),
    [
        (3, 4, 0, False, [3, 7, 11]),
        (3, 0, 0, False, [3]),
        (1, 1, 0, False, list(range(1, 13))),
        (3, 4, 5, True, [7, 11]),
        (3, 0, 5, True, []),
        (3, 4, 5, False, [6, 7, 11]),
        (3, 0, 5, False, [6]),
        (1000, 1000, 0, False, []),
    ],
)
def test_due_iterations(first, interval, started_at, was_fitted, expected):
    schedule = FitSchedule(first, interval)
    iterations = range(started_at + 1, 13)
    assert [i for i in iterations if schedule.is_due(i, started_at, was_fitted)] == expected


@pytest.mark.parametrize(("interval", "lag"), [(0, 5), (1000, 5), (3, 2), (1, 0)])
def test_a_fit_is_applied_before_the_next_is_recorded(interval, lag):
    assert FitSchedule(10, interval).lag == lag


def test_iterations_that_a_placement_serves():
    assert FitSchedule(100, 50).iterations_until_next(105, 1000) == 45
    assert FitSchedule(100, 50).iterations_until_next(105, 120) == 15
    assert FitSchedule(100, 0).iterations_until_next(105, 1000) == 895
    assert FitSchedule(100, 50).iterations_until_next(100, 100) == 0


def grouped(map_, ranks):
    return {frozenset(group) for group in np.asarray(map_).reshape(ranks, -1).tolist()}


@pytest.mark.parametrize("seed", range(8))
def test_renaming_keeps_who_shares_a_rank_and_a_node(seed):
    rng = np.random.default_rng(seed)
    old, new = rng.permutation(32), rng.permutation(32)
    renamed = fewest_moves(old, new, num_ranks=8, ranks_per_node=4)
    assert grouped(renamed, 8) == grouped(new, 8)
    assert grouped(renamed, 2) == grouped(new, 2)
    assert (renamed != old).sum() <= (new != old).sum()


def test_the_same_groups_under_other_names_move_nothing():
    old = np.arange(16)
    new = old.reshape(4, 4)[[2, 0, 3, 1], ::-1].reshape(-1)
    assert np.array_equal(fewest_moves(old, new, num_ranks=4, ranks_per_node=4), old)


def test_recorder_keeps_the_first_tokens_while_armed():
    recorder = RouteRecorder(topk=2)
    routing_map = torch.zeros(3, 8, dtype=torch.bool)
    for token, experts in enumerate([(1, 5), (0, 7), (2, 3)]):
        routing_map[token, list(experts)] = True
    recorder.add(routing_map)
    assert recorder.take().shape == (0, 2)
    recorder.arm(5)
    recorder.add(routing_map)
    recorder.add(routing_map)
    assert recorder.take().tolist() == [[1, 5], [0, 7], [2, 3], [1, 5], [0, 7]]
    recorder.add(routing_map)
    assert recorder.take().shape == (0, 2)


def test_recorder_leaves_out_tokens_that_lost_an_expert():
    recorder = RouteRecorder(topk=2)
    routing_map = torch.eye(8, dtype=torch.bool)
    routing_map[4, 6] = True
    recorder.arm(8)
    recorder.add(routing_map)
    assert recorder.take().tolist() == [[4, 6]]


def test_twice_the_fit_tokens_are_recorded_by_the_ranks_that_have_a_layer():
    """Two of the world's ranks, as with pipeline stages; a fit that is pending is not recorded over."""
    recorder, layer_id = RouteRecorder(topk=1), LayerId(DECODER, 0)
    refit = Refit(FitSchedule(3, 3), {layer_id: recorder}, [layer_id], 3, 2, lambda: None, print)
    refit.started_at = 4
    refit.before_step(5)
    recorder.add(torch.eye(8, dtype=torch.bool))
    refit.before_step(6)
    assert refit.recorded_at == 5
    assert recorder.take().ravel().tolist() == [0, 1, 2]


def coupled_tokens(tokens, seed):
    """[2, tokens, 2]: expert e goes with e + 8 of 16, so that contiguous halves always split a token."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 8, (2, tokens))
    return np.stack([first, first + 8], axis=2)


REQUEST = FitRequest(
    layer_ids=[[DECODER, 0, 0], [DECODER, 1, 0]],
    maps=[list(range(16))] * 2,
    num_experts=16,
    expert_parallel_size=2,
    ranks_per_node=2,
    load_tolerance=0.2,
)


def test_fit_in_a_process_of_its_own():
    answer = fit_process.answer_of(fit_process.start(coupled_tokens(512, 0), coupled_tokens(512, 1), REQUEST))
    assert answer.failure is None
    assert answer.rows_before == [2.0, 2.0] and answer.num_tokens == 512
    assert max(answer.rows_after) < 1.2
    assert answer == fit_process.solve(coupled_tokens(512, 0), coupled_tokens(512, 1), REQUEST)


def test_a_fit_serves_shuffling_only_where_tables_will_be_fitted(monkeypatch):
    asked = []

    def refuse(*arguments, for_shuffling, **options):
        asked.append(for_shuffling)
        raise NoGainError("asked")

    monkeypatch.setattr(fit_process, "fit", refuse)
    tokens = coupled_tokens(64, 0)
    for request in (REQUEST, replace(REQUEST, for_shuffling=True)):
        assert fit_process.solve(tokens, tokens, request).failure.startswith("asked. ")
    assert asked == [False, True]


def test_a_fit_without_gain_says_so():
    rng = np.random.default_rng(0)
    uniform = np.argsort(rng.random((2, 512, 16)), axis=2)[..., :2]
    answer = fit_process.solve(uniform, uniform, REQUEST)
    assert "no layer gains beyond chance" in answer.failure and "--placement-fit-tokens" in answer.failure
    assert "--num-tokens" not in answer.failure


def test_a_fit_that_breaks_says_so():
    broken = FitRequest(**{**json.loads(json.dumps(REQUEST.__dict__)), "expert_parallel_size": 3})
    answer = fit_process.answer_of(fit_process.start(coupled_tokens(64, 0), coupled_tokens(64, 1), broken))
    assert "the fit ended with code 1" in answer.failure and "not divisible" in answer.failure


def test_layers_move_only_where_it_repays():
    cost = MoveCost(
        expert_bytes=1000, row_bytes=100, tokens_per_iteration=10, expert_parallel_size=2, ranks_per_node=2
    )
    layer = [LayerId(DECODER, index) for index in range(3)]
    old = {layer_id: np.arange(4) for layer_id in layer}
    swapped = [0, 2, 1, 3]
    lines = []
    # Two experts cost 2000 bytes; a row less saves 10 tokens x 100 bytes x 1/2 remote x 4 passes = 2000.
    answer = FitAnswer([swapped, swapped, [0, 1, 2, 3]], [2.0, 2.0, 2.0], [0.9, 1.1, 2.0])
    maps = worthwhile(answer, old, cost, 1, lines.append)
    assert maps[layer[0]].tolist() == swapped
    assert maps[layer[1]].tolist() == maps[layer[2]].tolist() == [0, 1, 2, 3]
    assert "moving 2 experts sends 0.0 MB" in lines[0] and "1 layers stay" in lines[0]
    assert worthwhile(answer, old, cost, 2, lines.append)[layer[1]].tolist() == swapped
