"""Real training with and without --ciera over every way in which people run the distributed optimizer.

Unmarked cases take a few minutes; `make test-full` runs all of them over 200 iterations.
"""

from dataclasses import dataclass, field

import pytest

from megatron_ciera import observe
from megatron_ciera.comparison import compare
from tests.launching import TINY, launch, without

EXPERTS = "--expert-model-parallel-size 2"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
CIERA = "--ciera --ciera-warmup-iters 2"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
PIPELINE = "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{PIPELINE} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
FP16 = "--fp16 --initial-loss-scale 4294967296 --hysteresis 1"  # the first steps overflow and are skipped
SMALL_BUCKETS = "--ddp-bucket-size 20000"
EVAL = "--eval-interval 4 --eval-iters 1"


@dataclass(frozen=True)
class Case:
    """One combination of options. `most`: the largest ratio of bytes sent to raw that is acceptable."""

    processes: int
    flags: str
    ciera: str = CIERA
    drop: tuple[str, ...] = field(default=())
    most: float = 0.9
    quick: bool = False


CASES = {
    "experts": Case(4, f"{EXPERTS} --check-weight-hash-across-dp-replicas-interval 3", quick=True),
    "overlap": Case(
        4,
        f"{EXPERTS} {OVERLAP} {SMALL_BUCKETS} {EVAL}",
        f"{CIERA} --ciera-verify-interval 5",
        most=2.0,
        quick=True,
    ),
    "fp16 with skipped steps": Case(
        2,
        f"{EXPERTS} {FP16} --train-iters 24",
        f"{CIERA} --ciera-codec exponent-reuse --ciera-no-selection",
        ("--bf16",),
        1.0,
        quick=True,
    ),
    "interleaved pipeline": Case(4, f"{INTERLEAVED} {OVERLAP}"),
    "exponent reuse": Case(4, EXPERTS, f"{CIERA} --ciera-codec exponent-reuse", most=0.95),
    "exponent reuse, overlap": Case(4, f"{EXPERTS} {OVERLAP}", f"{CIERA} --ciera-codec exponent-reuse"),
    "no selection": Case(4, EXPERTS, f"{CIERA} --ciera-no-selection --ciera-no-overlap"),
    "budget": Case(4, f"{EXPERTS} {OVERLAP}", f"{CIERA} --ciera-cache-budget-mb 0.12", most=1.0),
    "no warm-up": Case(4, EXPERTS, "--ciera --ciera-warmup-iters 0"),
    "dense, DP 3": Case(3, f"{OVERLAP} --global-batch-size 3"),
    "dense, DP 1": Case(1, OVERLAP, most=1.0),
    "fp32": Case(2, OVERLAP, drop=("--bf16",)),
    "fp16, overlap": Case(4, f"{EXPERTS} {OVERLAP} {FP16}", drop=("--bf16",)),
    "bf16 gradients": Case(4, f"{EXPERTS} {OVERLAP} --grad-reduce-in-bf16"),
    "eval without overlap": Case(4, f"{EXPERTS} {EVAL}"),
    "tensor parallel": Case(4, f"{TENSOR} {EXPERTS} {OVERLAP}"),
    "expert tensor parallel": Case(4, f"--tensor-model-parallel-size 2 --sequence-parallel {OVERLAP}"),
    "pipeline": Case(4, f"{PIPELINE} {EXPERTS} {OVERLAP}"),
    "gathers not aligned": Case(4, f"{INTERLEAVED} {OVERLAP} --no-align-param-gather"),
    "overlap with the optimizer step": Case(
        4,
        f"{INTERLEAVED} {OVERLAP} --overlap-param-gather-with-optimizer-step --ckpt-format torch",
        drop=("--num-experts",),
    ),
    "two optimizer instances": Case(4, f"{OVERLAP} --num-distributed-optimizer-instances 2"),
    "untied embeddings": Case(4, f"{EXPERTS} {OVERLAP} --untie-embeddings-and-output-weights"),
    "weight hashes with overlap": Case(
        4, f"{EXPERTS} {OVERLAP} --check-weight-hash-across-dp-replicas-interval 2"
    ),
    "high bus bandwidth padding": Case(2, f"{OVERLAP} --ddp-pad-buckets-for-high-nccl-busbw", most=0.95),
    "average in collective": Case(4, f"{EXPERTS} {OVERLAP} --ddp-average-in-collective"),
}


def moe_free(flags: list[str]) -> list[str]:
    names = [word for word in flags if word.startswith(("--moe", "--num-experts"))]
    return without(flags, *names)


def check(case: Case, iterations: int, folder) -> list[dict]:
    base = moe_free(TINY) if "--num-experts" in case.drop else without(TINY, *case.drop)
    flags = [*base, "--train-iters", str(iterations), *case.flags.split()]
    plain = launch(folder / "plain", case.processes, flags, timeout=1500).check()
    ciera = launch(folder / "ciera", case.processes, [*flags, *case.ciera.split()], timeout=1500).check()
    found = compare(plain.observed, ciera.observed)
    assert found.equal, found
    return ciera.iterations


def total(records: list[dict], name: str) -> float:
    return sum(observe.metric(record, f"ciera/{name}") for record in records)


def check_metrics(case: Case, records: list[dict]) -> None:
    raw, sent = total(records, "bytes_raw"), total(records, "bytes_sent")
    if case.processes == 1:
        assert raw == sent == 0
        return
    assert total(records, "coded_gathers") > 0
    assert sent <= case.most * raw


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.quick])
def test_training_is_bit_identical(name, tmp_path):
    iterations = 24 if "skipped" in name else 10
    check_metrics(CASES[name], check(CASES[name], iterations, tmp_path))


@pytest.mark.parametrize("warmup, iterations", [(30, 3), (2, 4)], ids=["inside the warm-up", "beyond it"])
def test_the_end_says_whether_anything_was_compressed(warmup, iterations, tmp_path):
    flags = ["--train-iters", str(iterations), "--ciera", "--ciera-warmup-iters", str(warmup)]
    run = launch(tmp_path, 2, [*TINY, *flags]).check()
    coded = total(run.iterations, "coded_gathers")
    assert (coded == 0) == (warmup > iterations)
    assert f"{coded:.0f} gathers compressed, " in run.output
    nothing = f"gathers were in the warm-up (--ciera-warmup-iters {warmup})"
    assert (nothing in run.output) == ("--ciera had no effect" in run.output) == (coded == 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_is_bit_identical_over_200_iterations(name, tmp_path):
    check_metrics(CASES[name], check(CASES[name], 200, tmp_path))


def resumed(folder, flags: list[str], processes: int, extra: list[str], name: str):
    """Continues the checkpoint in `folder/checkpoint` to iteration 10."""
    # The schedule counts iterations of weight decay by --train-iters, which the first run had otherwise.
    load = ["--load", str(folder / "checkpoint"), "--train-iters", "10", "--override-opt-param-scheduler"]
    return launch(folder / name, processes, [*flags, *load, *extra], timeout=600).check()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["", OVERLAP], ids=["no overlap", "overlap"])
@pytest.mark.parametrize("processes", [4, 2], ids=["same DP", "other DP"])
def test_save_and_resume(processes, overlap, tmp_path):
    flags = [*TINY, *EXPERTS.split(), *overlap.split(), "--dist-ckpt-optim-fully-reshardable"]
    save = ["--train-iters", "5", "--save", str(tmp_path / "checkpoint"), "--save-interval", "5"]
    launch(tmp_path / "first", 4, [*flags, *save, *CIERA.split()], timeout=600).check()
    plain = resumed(tmp_path, flags, processes, [], "plain")
    ciera = resumed(tmp_path, flags, processes, CIERA.split(), "ciera")
    found = compare(plain.observed, ciera.observed)
    assert found.equal, found
    assert total(ciera.iterations, "raw_fallbacks") == 0
