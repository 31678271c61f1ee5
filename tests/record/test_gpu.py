"""The recorder on two GPUs: CUDA events instead of host times."""

import pytest
import torch

from megatron_ciera.record.clock import on_gpu
from megatron_ciera.simulator.replay import replay_as_recorded
from megatron_ciera.simulator.trace import read_trace
from megatron_ciera.transformer_engine import LOCAL_LAYERS
from tests.launching import TINY, launch


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu() or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "overlap", [[], ["--overlap-grad-reduce", "--overlap-param-gather"]], ids=["plain", "overlap"]
)
def test_recorded_run_on_gpus(tmp_path, overlap):
    folder = tmp_path / "trace"
    flags = [*TINY, *LOCAL_LAYERS, *overlap, "--expert-model-parallel-size", "2", "--ciera-record", folder]
    launch(tmp_path / "run", 2, flags).check()
    trace = read_trace(str(folder))
    assert trace.header["clock"] == "cuda"
    assert [iteration.number for iteration in trace.iterations] == [1, 2, 3, 4, 5, 6]
    assert replay_as_recorded(trace) == pytest.approx(trace.typical().seconds, rel=1e-6)
    for iteration in trace.iterations[1:]:
        kinds = {(call.kind, call.role) for call in iteration.calls.values()}
        assert {("all_to_all", "expert"), ("reduce_scatter", "data"), ("all_gather", "data")} <= kinds
        assert all(call.end > call.start for call in iteration.calls.values())
