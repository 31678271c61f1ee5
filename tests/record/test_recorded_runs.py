"""A recorded run: the same training bit for bit, and a trace that the simulator plays back to the recorded time."""

import pytest

from megatron_ciera.simulator.replay import replay_as_recorded
from megatron_ciera.simulator.trace import read_trace
from tests.launching import TINY, launch

FLAGS = [
    *TINY,
    "--expert-model-parallel-size",
    "2",
    "--train-iters",
    "4",
    "--ciera",
    "--ciera-warmup-iters",
    "2",
]


def test_recorded_run(tmp_path):
    plain = launch(tmp_path / "plain", 4, FLAGS).check()
    folder = tmp_path / "trace"
    recorded = launch(tmp_path / "recorded", 4, [*FLAGS, "--ciera-record", folder]).check()
    assert recorded.parameters == plain.parameters
    assert [record["losses"] for record in recorded.iterations] == [r["losses"] for r in plain.iterations]

    assert sorted(file.name for file in folder.iterdir()) == [f"trace_rank{rank}.json" for rank in range(4)]
    for rank in range(4):
        trace = read_trace(str(folder / f"trace_rank{rank}.json"))
        assert trace.header["clock"] == "host"
        assert trace.header["features"] == ["ciera"]
        assert [iteration.number for iteration in trace.iterations] == [1, 2, 3, 4]
        assert replay_as_recorded(trace) == pytest.approx(trace.typical().seconds, rel=1e-9)
        seen = {(call.kind, call.role, call.size) for call in trace.iterations[2].calls.values()}
        assert {
            ("all_to_all", "expert", 2),
            ("reduce_scatter", "data", 4),
            ("reduce_scatter", "expert data", 2),
            ("all_gather", "data", 4),
            ("all_gather", "expert data", 2),
        } <= seen
    rates = [name for name in trace.metrics if name.endswith("/expert/exponent_change_rate")]
    assert len(rates) == 1 and 0 < trace.metrics[rates[0]] < 1
    assert trace.metrics["ciera/bytes_sent"] > 0


def test_none_of_it_without_the_flag():
    import torch.distributed as dist

    assert not hasattr(dist.Work.wait, "_megatron_ciera_original")
