"""Whole training runs with shuffled tokens: the first iteration has the bits of the unshuffled run.

TP = EP = 2, `--clip-grad 0`. Random tables move nearly every token; where locality is looked at, tables are fitted.
"""

import re

import pytest
from shuffle_files import write_placement

from megatron_ciera import observe
from tests.launching import TINY, launch

BF16_STEP = 2.0**-8
FLAGS = [
    *TINY,
    *"--clip-grad 0 --train-iters 3 --micro-batch-size 2 --moe-router-load-balancing-type seq_aux_loss".split(),
    *"--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2".split(),
    *"--expert-tensor-parallel-size 1".split(),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains under a placement of `layers` layers, with tables beside it; `shuffle`: more flags, None for without."""
    folder = tmp_path_factory.mktemp("shuffled")

    def run(name, words="", shuffle: str | None = "", layers=5, processes=2):
        file = folder / f"placement{layers}.json"
        if not file.exists():
            write_placement(file, layers, 2)
        flags = [
            *FLAGS,
            "--num-layers",
            layers,
            "--correlated-placement",
            "--placement-file",
            file,
            *words.split(),
        ]
        if shuffle is not None:
            flags += ["--token-shuffle", *shuffle.split()]
        return launch(folder / name, processes, flags, timeout=900).check()

    run.folder = folder
    return run


def losses(run) -> list[dict]:
    return [record["losses"] for record in run.iterations]


def assert_first_iteration_has_the_bits_of(ours, plain) -> None:
    first, wanted = ours.iterations[0], plain.iterations[0]
    for name in wanted["losses"]:
        assert first["losses"][name] == wanted["losses"][name], name
    assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=BF16_STEP)
    assert first["metrics"]["moe/shuffle_rows_moved"] > 0
    for found, expected in zip(ours.iterations, plain.iterations, strict=True):
        assert found["losses"]["lm loss"] == pytest.approx(expected["losses"]["lm loss"], rel=BF16_STEP)
        assert found["metrics"]["moe/rows_stock"] == expected["metrics"]["moe/rows_stock"]


@pytest.fixture(scope="module")
def shuffled(train):
    return train("shuffled", f"--save {train.folder / 'saved'} --save-interval 2")


def test_a_run_without_tables_says_that_nothing_was_shuffled(tmp_path, shuffled):
    run = launch(tmp_path, 2, [*FLAGS, "--num-layers", "5", "--token-shuffle"]).check()
    why = run.iterations[-1]["without_effect"]["--token-shuffle"]
    assert f"--token-shuffle had no effect: {why}" in run.output and "from iteration 1000 on" in why
    assert "--token-shuffle" not in shuffled.iterations[-1].get("without_effect", {})
    moved = sum(observe.metric(record, "moe/shuffle_rows_moved") for record in shuffled.iterations)
    assert shuffled.iterations[-1]["effect"]["--token-shuffle"] == f"{moved:.0f} rows moved to another rank"


def test_a_shuffled_run_starts_with_the_bits_of_the_plain_one(train, shuffled):
    plain = train("plain", shuffle=None)
    assert_first_iteration_has_the_bits_of(shuffled, plain)
    assert "token shuffling: layers 2, 3 can shuffle among 2 ranks, residual: exchange" in shuffled.output
    found, without = shuffled.iterations[0]["metrics"], plain.iterations[0]["metrics"]
    assert "moe/locality" not in without
    # The dispatcher's own counters see what the shuffle counts: combine sends rows of 64 bf16 values only.
    assert found["moe/rows_distinct"] == without["moe/rows_distinct"]
    saved = without["moe/bytes_combine"] - found["moe/bytes_combine"]
    assert found["moe/shuffle_bytes_saved"] == 2 * saved
    by_layer = [value for name, value in found.items() if name.startswith("moe/shuffle_bytes_added/")]
    assert sum(by_layer) == found["moe/shuffle_bytes_added"] and len(by_layer) == 3
    assert 0 < found["moe/shuffle_spill"] < 1 and found["moe/planner_ms"] > 0


@pytest.mark.slow
def test_recomputed_and_resumed_runs_have_the_same_bits(train, shuffled):
    words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    recomputed = train("recomputed", words)
    assert losses(recomputed) == losses(shuffled) and recomputed.parameters == shuffled.parameters
    resumed = train("resumed", f"--load {train.folder / 'saved'} --ckpt-step 2")
    assert losses(resumed) == losses(shuffled)[2:] and resumed.parameters == shuffled.parameters


# name -> (layers, processes, flags)
LAYOUTS = {
    "pipeline": (8, 4, "--pipeline-model-parallel-size 2 --micro-batch-size 1"),
    "virtual pipeline, recomputed": (
        16,
        4,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    "MTP, data parallel, compressed gather": (
        5,
        4,
        "--mtp-num-layers 1 --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap --ciera "
        "--ciera-warmup-iters 1 --overlap-grad-reduce --overlap-param-gather --moe-router-dtype fp32",
    ),
    "stock dispatcher, expert bias": (
        5,
        2,
        "--no-dedup-dispatch --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-z-loss-coeff 1e-3",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(train, name):
    layers, processes, words = LAYOUTS[name]
    folder = re.sub(r"\W+", "_", name)
    plain = train(f"{folder}_plain", words, shuffle=None, layers=layers, processes=processes)
    ours = train(f"{folder}_ours", words, layers=layers, processes=processes)
    assert_first_iteration_has_the_bits_of(ours, plain)


@pytest.mark.slow
def test_tables_fitted_in_the_run_find_experts_and_traces_stay_in_order(tmp_path):
    """Traced up to iteration 9, tables of iteration 1 in use after 6, so shuffled from 10 on and judged after 16."""
    words = (
        "--num-layers 5 --seq-length 512 --max-position-embeddings 512 --train-iters 200 --exit-interval 18"
    )
    fit = "--placement-fit-iteration 1 --placement-fit-tokens 1024 --placement-refit-interval 0"

    def run(name, *more):
        trace = f"--moe-routing-trace-path {tmp_path / name} --moe-routing-trace-max-training-iters 9"
        return launch(tmp_path / f"{name}_run", 2, [*FLAGS, *words.split(), *trace.split(), *more]).check()

    plain, ours = run("plain"), run("ours", "--token-shuffle", *fit.split())
    assert "token shuffling: on in 2 of 2 layers after iteration 6" in ours.output
    assert "switched off" not in ours.output
    metrics = [record["metrics"] for record in ours.iterations]
    assert all("moe/locality" not in found for found in metrics[:9])
    assert all(found["moe/locality"] > found["moe/locality_by_position"] + 0.01 for found in metrics[9:])
    assert losses(ours)[:10] == losses(plain)[:10] and losses(ours)[11:] != losses(plain)[11:]
    for rank in range(2):
        traces = [
            (tmp_path / name / f"router_trace_rank{rank}.jsonl").read_text() for name in ("plain", "ours")
        ]
        assert traces[0] == traces[1] and traces[0].count("\n") >= 9 * 5


@pytest.mark.slow
def test_tables_follow_a_placement_fitted_in_the_run(tmp_path):
    """Experts move after iteration 6; tables of iteration 7 are in use after 12."""
    words = (
        "--num-layers 5 --seq-length 512 --max-position-embeddings 512 --train-iters 2000 --exit-interval 15 "
    )
    words += "--correlated-placement --token-shuffle --placement-fit-iteration 1 --placement-fit-tokens 1024 "
    words += "--vocab-size 1023 --placement-refit-interval 0 --num-experts 16"
    run = launch(tmp_path / "run", 2, [*FLAGS, *words.split()]).check()
    assert "fit of iteration 1, applied after iteration 6: experts moved in" in run.output
    assert "layers after iteration 6" not in run.output
    assert "token shuffling: on in 2 of 2 layers after iteration 12" in run.output
    found = [record["metrics"] for record in run.iterations]
    assert all("moe/locality" not in metrics for metrics in found[:12])
    assert all(metrics["moe/locality"] > metrics["moe/locality_by_position"] for metrics in found[12:])


@pytest.mark.slow
def test_what_does_not_repay_is_switched_off(train):
    run = train("judged", "--train-iters 200 --exit-interval 13")
    assert "token shuffling: switched off in all layers, as it does not repay here" in run.output
    assert (
        "moe/locality" in run.iterations[9]["metrics"] and "moe/locality" not in run.iterations[11]["metrics"]
    )
