"""Megatron's own training loop on CPU: each form of parallelism, and checkpoints that continue bit by bit."""

import math
import re

import pytest

from tests.launching import TINY, Run, launch

EP2 = ["--expert-model-parallel-size", 2]
SEQUENCE_PARALLEL = ["--tensor-model-parallel-size", 2, "--sequence-parallel"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
SAVED_AT = 2

# One unit of bfloat16: layouts differ in the order of their sums and in nothing else.
BF16_UNIT = 2.0**-8


def train(folder, processes: int, *flags) -> Run:
    return launch(folder, processes, [*TINY, "--train-iters", 4, *flags]).check()


def losses(run: Run) -> list[float]:
    return [record["losses"]["lm loss"] for record in run.iterations]


def assert_learns(run: Run) -> None:
    values = losses(run)
    assert len(values) == 4 and all(map(math.isfinite, values))
    # A uniform guess over 256 tokens is ln 256.
    assert values[-1] < values[0] < 1.1 * math.log(256)


def assert_replicas_agree(run: Run, names=("layernorm.weight", "router.weight")) -> None:
    """Parameters that every rank holds whole have the same bits everywhere."""
    ranks = list(run.parameters.values())
    shared = [name for name in ranks[0] if name.endswith(names)]
    assert len(shared) >= len(names)
    for name in shared:
        assert len({digests[name] for digests in ranks}) == 1, name


def assert_same_end(run: Run, other: Run, first_iteration: int) -> None:
    """Losses and gradient norms from `first_iteration` on, and all parameters, are the same bits."""
    assert run.iterations[first_iteration - 1 :] == other.iterations
    assert run.parameters == other.parameters


def test_overlapped_gather_and_reduce_change_no_bit(tmp_path):
    plain = train(tmp_path / "plain", 2)
    overlapped = train(tmp_path / "overlapped", 2, *OVERLAP)
    assert_learns(plain)
    assert_same_end(plain, overlapped, 1)
    assert_replicas_agree(plain, ("weight",))


RESUMED = {
    # Dropout draws from the generator that the checkpoint holds; the workers must not move it.
    "expert parallel, dropout, overlap, workers, asynchronous save": (
        *("--bf16", *EP2, *OVERLAP, "--hidden-dropout", 0.1, "--attention-dropout", 0.1),
        *("--num-workers", 1, "--async-save"),
    ),
    # The first iteration overflows and is skipped; the scale grows again two iterations later, after the
    # resume, as the scaler counts iterations across it.
    "float16 with a loss scale that overflows": (
        *("--fp16", "--initial-loss-scale", 2.0**20, "--hysteresis", 1, "--loss-scale-window", 2),
    ),
    "virtual pipeline": (
        *("--bf16", "--pipeline-model-parallel-size", 2, "--num-layers", 4),
        *("--num-layers-per-virtual-pipeline-stage", 1),
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "virtual pipeline" else ()) for name in RESUMED],
)
def test_resumed_run_ends_with_the_same_bits(name, tmp_path):
    flags = [*(flag for flag in TINY if flag != "--bf16"), "--train-iters", 4, *RESUMED[name]]
    checkpoints = tmp_path / "checkpoints"
    save = ["--save", checkpoints, "--save-interval", SAVED_AT]
    whole = launch(tmp_path / "whole", 2, [*flags, *save]).check()
    load = ["--load", checkpoints, "--ckpt-step", SAVED_AT]
    resumed = launch(tmp_path / "resumed", 2, [*flags, *load]).check()
    assert_learns(whole)
    assert_same_end(whole, resumed, SAVED_AT + 1)
    if "--fp16" in flags:
        scales = [re.findall(r"loss scale: (\d+)", run.output) for run in (whole, resumed)]
        assert scales[0][:3] == ["524288", "524288", "1048576"]
        assert scales[0][SAVED_AT:] == scales[1]


def test_sequence_parallel_checkpoint_loads_in_another_layout(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    reshardable = ["--dist-ckpt-optim-fully-reshardable"]
    layout = [*SEQUENCE_PARALLEL, *EP2, "--expert-tensor-parallel-size", 1]
    save = ["--save", checkpoints, "--save-interval", SAVED_AT]
    saved = train(tmp_path / "saved", 4, *layout, *reshardable, *save)
    assert_learns(saved)
    # Wrong if the norms' partial gradients were not summed over the sequence slices.
    assert_replicas_agree(saved)
    load = ["--load", checkpoints, "--ckpt-step", SAVED_AT]
    loaded = train(tmp_path / "loaded", 2, *EP2, *reshardable, *load)
    assert losses(loaded) == pytest.approx(losses(saved)[SAVED_AT:], rel=BF16_UNIT)
    norms = [record["grad_norm"] for record in loaded.iterations]
    assert norms == pytest.approx([record["grad_norm"] for record in saved.iterations[SAVED_AT:]], rel=0.05)


def test_tensor_parallel_experts_gather_uneven_rows(tmp_path):
    run = train(tmp_path / "run", 4, *SEQUENCE_PARALLEL, *EP2)
    assert_learns(run)
    assert_replicas_agree(run)


def test_flag_that_needs_a_gpu_stops_every_rank_in_one_line(tmp_path):
    run = launch(tmp_path / "run", 2, [*TINY, "--context-parallel-size", 2])
    assert run.returncode != 0 and run.tracebacks == 0
    assert run.said.count("--context-parallel-size: found 2, needs 1 without a GPU") == 1
    assert not (run.observed / "iterations.jsonl").exists()
