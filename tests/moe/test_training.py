"""Whole training runs: placements change no bit, checkpoints are logical, rows add up over a run.

With top-2 every sum of the dispatch has two terms, so that even the deduplicating dispatcher has the bits of
stock. `--clip-grad 0`: a gradient norm sums experts in slot order, and clipping spreads its last bit.
"""

import subprocess
import sys

import pytest
import torch

from tests.launching import ROOT, TINY, launch
from tests.moe.placed_runs import (
    BY_EXPERT,
    by_expert,
    checkpoint,
    placed,
    resume,
    same_checkpoint,
    write_placement,
)

PLAIN = (str(ROOT / "tests" / "plain_megatron.py"),)
FLAGS = [*TINY, "--clip-grad", "0", "--train-iters", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("placed")


@pytest.fixture(scope="module")
def maps(folder):
    return {name: write_placement(folder / f"{name}.json", 2, seed) for name, seed in (("a", 0), ("b", 1))}


@pytest.fixture(scope="module")
def train(folder):
    """Trains up to iteration 3 on four processes, by default at EP 2."""

    def run(name, *words, expert_parallel=2, **options):
        words = [*FLAGS, "--expert-model-parallel-size", expert_parallel, *words]
        return launch(folder / name, 4, words, **options).check()

    return run


@pytest.fixture(scope="module")
def stock(folder, train):
    """Contiguous, and saved as plain Megatron saves: the optimizer by slot."""
    return train("stock", "--save", folder / "plain", "--save-interval", 1)


@pytest.fixture(scope="module")
def run_a(folder, train, maps, stock):
    """Iterations 2 and 3 under placement A with the deduplicating dispatcher, both saved."""
    words = [*resume(folder / "plain", 1), "--save", folder / "under_a", "--save-interval", 1]
    return train("run_a", *placed(folder, "a"), *words)


def test_a_placed_run_has_the_bits_of_the_contiguous_one(stock, run_a, maps):
    assert by_expert(run_a, 2, maps["a"]) == by_expert(stock, 2)
    for plain, ours in zip(stock.iterations[1:], run_a.iterations, strict=True):
        assert ours["losses"] == plain["losses"]


def test_a_run_whose_checkpoint_is_at_its_end_says_so(folder, train, stock):
    run = train("at_its_end", "--load", folder / "plain", "--ciera", "--dedup-dispatch")
    said = "nothing was trained: the checkpoint is at iteration 3 and training ends at 3 (--train-iters)"
    assert "Raise --train-iters, or load an earlier checkpoint" in run.output
    assert "had no effect" not in run.output and "bytes sent (ratio" not in run.output
    assert run.output.count(said) == 1 and not (folder / "at_its_end" / "iterations.jsonl").exists()
    assert "nothing was trained" not in stock.output


def test_a_placement_without_the_checkpoint_that_was_meant_is_said(folder, train, run_a, maps):
    run = train("no_checkpoint", *placed(folder, "a"), "--load", folder / "misspelled")
    assert (
        run.output.count(f"--load {folder}/misspelled: found no checkpoint: training starts from random") == 1
    )
    assert "found no checkpoint" not in run_a.output


def test_rows_sent_and_stock(run_a):
    for record in run_a.iterations:
        found = record["metrics"]
        assert found["moe/rows_stock"] == 2 * 2 * 4 * 64
        assert found["moe/rows_sent"] == found["moe/rows_distinct"] < found["moe/rows_stock"]


def test_the_checkpoint_names_its_placement(folder, run_a, maps):
    from megatron.core import dist_checkpointing

    stored = dist_checkpointing.load_common_state_dict(str(folder / "under_a" / "iter_0000003"))
    document = stored["args"].ciera_placement
    assert {layer["layer"]: layer["physical_to_logical_map"] for layer in document["layers"]} == maps["a"]


def test_another_placement_continues_with_the_same_bits(folder, train, run_a, stock, maps):
    words = resume(folder / "under_a", 2)
    run = train("run_b", *placed(folder, "b"), "--no-dedup-dispatch", *words, "--save", folder / "under_b")
    assert by_expert(run, 2, maps["b"]) == by_expert(stock, 2)
    same_checkpoint(checkpoint(folder / "under_a", 3), checkpoint(folder / "under_b", 3))


def test_plain_megatron_continues_with_the_same_bits(folder, train, run_a, stock):
    words = resume(folder / "under_a", 2)
    run = train("plain_from_a", *words, "--save", folder / "from_a", BY_EXPERT, script=PLAIN)
    assert by_expert(run, 2) == by_expert(stock, 2)
    same_checkpoint(checkpoint(folder / "under_a", 3), checkpoint(folder / "from_a", 3))


def test_one_expert_parallel_rank_computes_the_same(folder, train, run_a, stock):
    """Plain Megatron at EP 1, without the optimizer, which upstream cannot load there: weights and loss agree."""
    words = [
        *resume(folder / "under_a", 2),
        "--no-load-optim",
        "--save",
        folder / "one",
        "--lr",
        "0",
        "--min-lr",
        "0",
    ]
    words += ["--override-opt-param-scheduler", "--weight-decay", "0", "--no-save-optim"]
    run = train("one_rank", *words, expert_parallel=1, script=PLAIN)
    assert run.iterations[0]["losses"] == stock.iterations[2]["losses"]
    saved, given = checkpoint(folder / "one", 3), checkpoint(folder / "under_a", 2)
    assert sum("experts" in name for name in saved) == 2
    for name in saved:
        assert torch.equal(saved[name].view(torch.uint8), given[name].view(torch.uint8)), name


@pytest.mark.slow
def test_experts_that_move_while_the_last_checkpoint_is_written(folder, train):
    """Saved in the background after iteration 1, moved after iteration 2: both hold the contiguous run's bits."""
    words = "--seq-length 512 --max-position-embeddings 512 --global-batch-size 8 --vocab-size 1023"
    words = [*words.split(), "--train-iters", 2000, "--exit-interval", 2, "--save-interval", 1]
    fit = "--correlated-placement --placement-fit-iteration 2 --placement-fit-tokens 2048".split()
    train("unmoved", *words, "--save", folder / "unmoved_saved", BY_EXPERT, expert_parallel=4)
    saved = ["--save", folder / "moved_saved", "--async-save", "--use-persistent-ckpt-worker"]
    moved = train("moved", *words, *fit, *saved, expert_parallel=4)
    assert "Disabling --async-save" not in moved.output
    assert "applied after iteration 2: experts moved in 2 of 2 layers" in moved.output
    for iteration in (1, 2):
        first, second = (checkpoint(folder / f"{run}_saved", iteration) for run in ("unmoved", "moved"))
        same_checkpoint(first, second)


@pytest.mark.parametrize(
    "layout",
    [
        "--expert-model-parallel-size 4",
        pytest.param("--pipeline-model-parallel-size 2", marks=pytest.mark.slow),
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_layouts_read_every_value(folder, train, run_a, layout):
    """Loaded at the last iteration and saved again: nothing is trained, everything is moved."""
    saved = folder / layout.replace(" ", "_")
    words = ["--correlated-placement", *resume(folder / "under_a", 3), "--save", saved, *layout.split()]
    run = train(saved.name + "_run", *words)
    if "expert-model" in layout:
        assert "expert-parallel size 2, this run has 4: experts start contiguous" in run.output
    same_checkpoint(checkpoint(folder / "under_a", 3), checkpoint(saved, 3))


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--correlated-placement", "--dedup-dispatch"])
def test_state_by_slot_is_refused_at_another_size(folder, stock, flag):
    words = ["--expert-model-parallel-size", 4, flag, *resume(folder / "plain", 1)]
    run = launch(folder / f"refused{flag}", 4, [*FLAGS, *words])
    assert run.returncode != 0 and run.tracebacks == 0
    assert run.said.count("--expert-model-parallel-size: found 4, needs 2 as in the checkpoint") == 1
    assert "loading distributed checkpoint" not in run.output


@pytest.mark.slow
def test_from_two_ranks_to_four_and_back(folder, train, run_a):
    """Other placements at each size; at the end every value is that of the first checkpoint."""
    write_placement(folder / "four.json", 4, 2)
    write_placement(folder / "two.json", 2, 3)
    words = ["--save", folder / "four", *resume(folder / "under_a", 3)]
    train("at_four", *placed(folder, "four"), *words, expert_parallel=4)
    same_checkpoint(checkpoint(folder / "under_a", 3), checkpoint(folder / "four", 3))
    train("at_two", *placed(folder, "two"), "--save", folder / "two", *resume(folder / "four", 3))
    same_checkpoint(checkpoint(folder / "under_a", 3), checkpoint(folder / "two", 3))


def test_a_fit_in_the_run_removes_rows_and_no_bit_changes(train):
    """Recorded in iteration 1, applied after iteration 6; parameters are gathered with overlap."""
    words = "--seq-length 512 --max-position-embeddings 512 --train-iters 2000 --exit-interval 8 --vocab-size 1023"
    words = [*words.split(), "--overlap-grad-reduce", "--overlap-param-gather"]
    fit = "--placement-fit-iteration 1 --placement-fit-tokens 1024"
    stock = train("contiguous", *words, expert_parallel=4)
    fitted = train("fitted", *words, "--correlated-placement", *fit.split(), expert_parallel=4)
    removed = [record["metrics"]["moe/rows_removed"] for record in fitted.iterations]
    assert "fit of iteration 1, applied after iteration 6: experts moved in 2 of 2 layers" in fitted.output
    assert min(removed[6:]) > max(removed[:6]) + 0.005
    assert [run["losses"] for run in fitted.iterations] == [run["losses"] for run in stock.iterations]


@pytest.mark.slow
def test_a_rank_killed_in_a_fit_leaves_the_last_checkpoint_whole(folder, train):
    """The fit of iteration 2 is finished before that iteration is saved: there rank 1 dies, and 1 is the last."""
    words = "--seq-length 512 --max-position-embeddings 512 --train-iters 2000 --vocab-size 1023 --save-interval 1"
    words += " --correlated-placement --placement-fit-iteration 2 --placement-fit-tokens 2048 --global-batch-size 8"
    words = [*words.split(), "--save", folder / "killed"]
    flags = [*FLAGS, "--expert-model-parallel-size", 4, *words, "--exit-interval", 5]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4]
    command += [ROOT / "tests" / "moe" / "killed_in_refit.py", *flags]
    # To a file: helper processes of a killed rank would keep a pipe open.
    with open(folder / "broken.log", "w") as log:
        assert subprocess.run(list(map(str, command)), stdout=log, stderr=log, timeout=240).returncode != 0
    assert (folder / "killed" / "latest_checkpointed_iteration.txt").read_text() == "1"
    load = ["--load", folder / "killed", "--exit-interval", 3]
    resumed = train("resumed", *words, *load, expert_parallel=4)
    assert [record["iteration"] for record in resumed.iterations] == [2, 3]
    assert "fit of iteration 2, applied after iteration 2: experts moved in" in resumed.output
