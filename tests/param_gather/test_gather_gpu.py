"""Training over NCCL against stock, bit for bit: on two GPUs, or with two ranks that share one.

MEGATRON_CIERA_TEST_ITERATIONS=500 makes longer runs of the same kind.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron_ciera.comparison import compare
from megatron_ciera.param_gather.codec.nvcomp_library import find_library, package_name
from megatron_ciera.record.clock import on_gpu
from megatron_ciera.simulator.replay import replay_as_recorded
from megatron_ciera.simulator.trace import read_trace
from megatron_ciera.transformer_engine import LOCAL_LAYERS
from tests.launching import TINY, launch, shared_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_gpu(), reason="needs a GPU")]

ITERATIONS = int(os.environ.get("MEGATRON_CIERA_TEST_ITERATIONS", "60"))
LENGTH = f"--deterministic-mode --train-iters {ITERATIONS} --lr-decay-iters {ITERATIONS}".split()
CODED = "--ciera --ciera-warmup-iters 4 --ciera-no-selection".split()
OVERLAP = "--overlap-grad-reduce --overlap-param-gather".split()
EXPERTS = "--expert-model-parallel-size 2 --clip-grad 0".split()
# Name: flags, CUDA_DEVICE_MAX_CONNECTIONS, and the stock run to compare with.
RUNS = {
    "stock": ([], 1, None),
    "packed": (CODED, 1, "stock"),
    "ans": ([*CODED, "--ciera-coder", "ans"], 1, "stock"),
    "overlap": ([*CODED, *OVERLAP, "--ciera-verify-interval", "20"], 8, "stock"),
    "exponent reuse": ([*CODED, "--ciera-codec", "exponent-reuse", "--ciera-no-overlap"], 1, "stock"),
    "experts": (EXPERTS, 1, None),
    "experts recorded": ([*EXPERTS, "--ciera-record", "trace"], 1, "experts"),
    "experts deduplicated": ([*EXPERTS, "--dedup-dispatch", *CODED], 8, "experts"),
}


def nvcomp_is_there() -> bool:
    try:
        return bool(find_library(package_name(torch.version.cuda)))
    except ValueError:
        return False


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, side by side as far as each process has two cores."""
    folder = tmp_path_factory.mktemp("runs")

    def start(name):
        flags, connections, _ = RUNS[name]
        return launch(
            folder / name.replace(" ", "_"),
            2,
            [*TINY, *LOCAL_LAYERS, *LENGTH, *flags],
            timeout=220 + ITERATIONS,
            **shared_gpu(),
            CUDA_DEVICE_MAX_CONNECTIONS=str(connections),
        )

    names = [name for name in RUNS if name != "ans" or nvcomp_is_there()]
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4)) as pool:
        return dict(zip(names, pool.map(start, names), strict=True))


@pytest.mark.parametrize("name", [name for name, (_, _, stock) in RUNS.items() if stock])
def test_bits_of_stock(runs, name):
    if name not in runs:
        pytest.skip("nvCOMP is not installed")
    stock, ours = runs[RUNS[name][2]].check(), runs[name].check()
    difference = compare(stock.observed, ours.observed)
    assert difference.equal, difference.first_difference
    assert difference.iterations == ITERATIONS
    if "--ciera" in RUNS[name][0]:
        assert ours.iterations[-1]["metrics"]["ciera/coded_gathers"] > 0


def test_a_recorded_iteration_is_replayed_to_its_time(runs):
    trace = read_trace(str(Path(runs["experts recorded"].check().observed) / "trace"))
    assert trace.header["clock"] == "cuda"
    assert len(trace.iterations) == ITERATIONS
    assert replay_as_recorded(trace) == pytest.approx(trace.typical().seconds, rel=1e-6)
    for iteration in trace.iterations[1:]:
        assert all(call.end > call.start for call in iteration.calls.values())
        kinds = {(call.kind, call.role) for call in iteration.calls.values()}
        assert {("all_to_all", "expert"), ("reduce_scatter", "data"), ("all_gather", "data")} <= kinds
