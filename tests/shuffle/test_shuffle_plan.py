"""Owners, layouts, moves, jobs, tables and counts: pure functions against slow twins and by hand."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from shuffle_files import random_tables

from megatron_ciera.shuffle import counters, profile
from megatron_ciera.shuffle.counters import Prices, ShuffleCounter, metrics, repays
from megatron_ciera.shuffle.fit import windows_of
from megatron_ciera.shuffle.jobs import Job, plan_jobs
from megatron_ciera.shuffle.layout import canonical, layout_of, plan_move
from megatron_ciera.shuffle.owners import PRICE_ROUNDS, assign, spilled
from megatron_ciera.shuffle.solve import Shape, solve, unpack
from megatron_ciera.shuffle.tables import FRACTION_BITS, ScoreTables
from placement.assignment import assign_owners, capacities, crowding_prices
from placement.prediction import predict_reference

# name -> (columns, ranks, tokens a column, what the scores are)
SCORES = {
    "free": (3, 4, 64, lambda rng, size: rng.integers(0, 10**6, size)),
    "many ties": (2, 8, 128, lambda rng, size: rng.integers(0, 3, size)),
    "all equal": (1, 4, 16, lambda rng, size: np.zeros(size, dtype=np.int64)),
    "everyone wants one rank": (
        2,
        4,
        32,
        lambda rng, size: np.eye(4, dtype=np.int64)[2][None, :, None] + np.zeros(size, int),
    ),
    "one token a rank": (2, 8, 8, lambda rng, size: rng.integers(0, 9, size)),
    "two ranks": (1, 2, 256, lambda rng, size: rng.integers(-50, 50, size)),
}


@pytest.mark.parametrize("name", SCORES)
def test_owners_are_those_of_the_twin_and_exactly_as_many(name):
    columns, ranks, tokens, make = SCORES[name]
    scores = make(np.random.default_rng(0), (columns, ranks, tokens))
    owners = assign(torch.from_numpy(scores))
    room = capacities(tokens, ranks)
    for column in range(columns):
        by_token = scores[column].T.astype(float)
        twin = assign_owners(by_token - crowding_prices(by_token, room, PRICE_ROUNDS), prices=False)
        assert np.array_equal(owners[column].numpy(), twin)
        assert np.array_equal(np.bincount(twin, minlength=ranks), room)


def test_the_kernel_takes_what_its_twin_takes():
    """In Triton's interpreter; compiled: test_shuffle_gpu.py."""
    pytest.importorskip("triton", reason="needs Triton")
    worker = Path(__file__).with_name("take_worker.py")
    process = subprocess.run([sys.executable, worker], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0 and process.stdout.strip() == "equal", process.stderr[-3000:]


def test_spill_counts_tokens_off_their_best_rank():
    scores = torch.tensor([[[9, 9, 9, 0], [0, 0, 0, 9]]])
    owners = assign(scores)
    assert sorted(owners[0].tolist()) == [0, 0, 1, 1]
    assert int(spilled(scores, owners)) == 1


def test_scores_are_the_prediction_in_fixed_point():
    tables, rng = random_tables(8, 4, seed=3), np.random.default_rng(1)
    previous, before = (rng.integers(0, 8, (50, 2)) for _ in range(2))
    found = ScoreTables.of(tables, "cpu").scores(torch.from_numpy(previous), torch.from_numpy(before))
    wanted = predict_reference(tables, previous, before)
    assert found.dtype == torch.int64
    assert np.abs(found.numpy() / (4 * 2**FRACTION_BITS) - wanted).max() < 2 * 2.0**-FRACTION_BITS


def exchanged(shards: list[torch.Tensor], moves) -> list[torch.Tensor]:
    """What an all-to-all of each rank's rows by its move delivers, simulated."""
    parts = [
        shard[move.send_order].split(move.sizes[0].tolist())
        for shard, move in zip(shards, moves, strict=True)
    ]
    arrived = [torch.cat([sent[rank] for sent in parts]) for rank in range(len(shards))]
    return [rows[move.arrival_place] for rows, move in zip(arrived, moves, strict=True)]


@pytest.mark.parametrize("columns", [1, 3])
def test_moves_take_every_token_to_its_new_place(columns):
    ranks, tokens = 4, 16
    generator = torch.Generator().manual_seed(0)
    layouts = [canonical(tokens * columns, "cpu")]
    for _ in range(2):
        layouts.append(layout_of(assign(torch.randint(0, 50, (columns, ranks, tokens), generator=generator))))
    layouts.append(layouts[0])
    numbers = torch.arange(tokens * columns)
    for old, new in zip(layouts, layouts[1:], strict=False):
        shards = list(old.token_at.chunk(ranks))
        moves = [plan_move(old, new, ranks, rank) for rank in range(ranks)]
        assert torch.equal(torch.cat(exchanged(shards, moves)), new.token_at)
        assert torch.equal(new.token_at[new.place_of], numbers)
        assert torch.equal(new.token_at % columns, numbers % columns)
        for move, shard in zip(moves, shards, strict=True):
            assert torch.equal(new.token_at[move.new_place], shard)
            assert torch.equal(shard[move.send_order][move.send_place], shard)


def test_a_solution_is_the_same_on_every_rank_but_for_the_move():
    tables, generator = ScoreTables.of(random_tables(8, 2, seed=0), "cpu"), torch.Generator().manual_seed(0)
    previous, before = (torch.randint(0, 8, (24, 2), generator=generator) for _ in range(2))
    old = canonical(24, "cpu")
    first, second = (
        unpack(solve(tables, previous, before, old, shape), shape)
        for shape in (Shape(24, 2, 2, rank) for rank in range(2))
    )
    assert torch.equal(first.layout.token_at, second.layout.token_at)
    assert first.move.sizes[0, 1] == second.move.sizes[1, 0] > 0
    shape = Shape(24, 2, 2, 1)
    back = unpack(solve(None, None, None, first.layout, shape), shape)
    assert torch.equal(back.layout.token_at, old.token_at)


JOBS = {
    "all MoE": ([1] * 5, [1] * 5, {1: (2, (1, 0)), 2: (3, (2, 1)), 3: (4, None)}),
    "dense first and last": ([0, 1, 1, 1, 0], [1] * 5, {2: (3, (2, 1)), 3: (4, None)}),
    "a dense layer between": ([1, 1, 0, 1, 1], [1] * 5, {1: (3, (1, 0)), 3: (4, None)}),
    "one without tables": ([1] * 5, [1, 1, 0, 1, 1], {2: (3, (2, 1)), 3: (4, None)}),
    "the back way starts later": ([1] * 6, [0, 0, 1, 0, 0, 0], {1: (2, (1, 0)), 4: (5, None)}),
    "too short": ([1] * 3, [1] * 3, {}),
    "no tables": ([1] * 6, [0] * 6, {}),
}


@pytest.mark.parametrize("name", JOBS)
def test_jobs(name):
    is_moe, predicted, wanted = JOBS[name]
    assert plan_jobs(is_moe, predicted) == {layer: Job(*job) for layer, job in wanted.items()}


PRICES = Prices(deduplicated=True, row_bytes=10, residual_bytes=7, gather_bytes=3)


def test_counts_and_metrics_by_hand():
    counter = ShuffleCounter("cpu")
    experts = torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]])
    # Ranks [0, 0], [1, 1], [0, 1], [0, 1]; this rank counts tokens 2 and 3, whose place by position is rank 1.
    counter.add_routing(experts, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]), (2, 4))
    counter.add_spill(torch.tensor(1), 4, rank=0)
    counter.add_moved(torch.tensor([2, 1]), rank=0)
    assert counter.counts.tolist() == [2, 4, 2, 2, 2, 2, 1, 4, 1]
    counter.counts[counters.ROWS_LOCAL] += 5
    values = metrics(
        ["layer_3", "layer_4"], torch.stack([counter.counts, torch.zeros(9, dtype=torch.int64)]), PRICES
    )
    assert values == {
        "moe/locality": 0.5,
        "moe/locality_by_position": 0.5,
        "moe/shuffle_spill": 0.25,
        "moe/shuffle_rows_moved": 1,
        "moe/shuffle_bytes_saved": 2 * 10 * 5,
        "moe/shuffle_bytes_added": 7 + 2 * 3,
        "moe/locality_by_position/layer_3": 0.5,
        "moe/shuffle_bytes_saved/layer_3": 100,
        "moe/shuffle_bytes_added/layer_3": 13,
    }
    counter.reset()
    assert metrics(["layer_3"], counter.counts[None], PRICES) == {}


@pytest.mark.parametrize(
    ("local", "by_position", "rows_saved", "stays"),
    [(600, 500, 80, True), (520, 500, 80, False), (600, 500, 10, False), (400, 500, -80, False)],
)
def test_a_trial_repays_beyond_noise_and_beyond_what_planning_sends(local, by_position, rows_saved, stays):
    counts = torch.tensor([500, 1000, local, by_position, 300 + rows_saved, 300, 0, 500, 100])
    assert repays(counts, PRICES) is stays
    assert not repays(torch.zeros(9, dtype=torch.int64), PRICES)


def test_windows_of_what_a_run_recorded():
    recorded = {layer: np.full((4, 2), layer, dtype=np.int16) for layer in (0, 2, 3, 4)}
    windows = windows_of(recorded, {layer: np.array([layer]) for layer in range(5)}, last=4)
    assert list(windows) == [3]
    assert windows[3].top_indices[:, 0, 0].tolist() == [0, 2, 3] and windows[3].expert_to_rank.tolist() == [3]


def test_profile_summary_by_hand():
    def kernel(stream, begin, length, name="gemm"):
        return {"cat": "kernel", "ts": begin, "dur": length, "name": name, "args": {"stream": stream}}

    events = [kernel(7, 0, 100), kernel(7, 90, 20), kernel(7, 200, 50), kernel(9, 100, 20, "gatherTopK")]
    events += [kernel(9, 120, 20), {"cat": "cpu_op", "ts": 0, "dur": 1, "name": "TopK"}]
    assert profile.summary(events) == {
        "planner_kernels": 2,
        "planner_busy_ms": 0.04,
        "beside_other_kernels": 0.25,
        "step_busy_ms": 0.16,
    }
    assert profile.summary(events[:3]) == {}
