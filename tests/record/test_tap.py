"""What the recorder sees of torch.distributed, and that it leaves it as it was. One process, a group of fakes."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ciera.record.chrome import TraceFile
from megatron_ciera.record.clock import HostClock
from megatron_ciera.record.tap import Tap
from megatron_ciera.simulator.trace import read_trace

# As Megatron does: an alias from before the recorder.
gather_alias = dist.all_gather_into_tensor


@pytest.fixture
def tap():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    tap = Tap(HostClock())
    tap.install()
    yield tap
    tap.remove()
    dist.destroy_process_group()


def record(tap, run):
    tap.start(7)
    run()
    return tap.stop()


def shown(marks):
    return [(what, call.kind, call.size, call.num_bytes) for what, _, call, _ in marks.events]


def test_every_kind_with_its_bytes(tap):
    whole, part = torch.zeros(8), torch.zeros(2)

    def run():
        gather_alias(whole, part)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_reduce(whole)
        dist.all_to_all_single(torch.zeros(8), whole)
        dist.broadcast(part, 0)

    marks = record(tap, run)
    launched = [event for event in shown(marks) if event[0] == "launch"]
    assert launched == [
        ("launch", "all_gather", 4, 32),
        ("launch", "reduce_scatter", 4, 32),
        ("launch", "all_reduce", 4, 32),
        ("launch", "all_to_all", 4, 32),
        ("launch", "broadcast", 4, 8),
    ]
    assert all(call.ended is not None for _, _, call, _ in marks.events)


def test_waits_come_where_they_are(tap):
    def run():
        first = dist.all_reduce(torch.zeros(3), async_op=True)
        second = dist.all_reduce(torch.zeros(5), async_op=True)
        second.wait()
        first.wait()

    assert [(what, size) for what, _, _, size in shown(record(tap, run))] == [
        ("launch", 12),
        ("launch", 20),
        ("wait", 20),
        ("wait", 12),
    ]


def test_coalesced_collectives(tap):
    whole, part = torch.zeros(8), torch.zeros(2)

    def run():
        with dist._coalescing_manager(async_ops=True) as handle:
            dist.all_gather_into_tensor(whole, part)
            dist.all_gather_into_tensor(whole, part)
        handle.wait()

    assert shown(record(tap, run)) == [("launch", "all_gather", 4, 64), ("wait", "all_gather", 4, 64)]


def test_groups_of_one_rank_and_times_between_iterations_are_not_recorded(tap):
    alone = dist.new_group([0])
    assert shown(record(tap, lambda: dist.all_reduce(torch.zeros(1), group=alone))) == []
    dist.all_reduce(torch.zeros(1))
    assert shown(record(tap, lambda: None)) == []


def test_originals_are_put_back_and_two_recorders_are_refused(tap):
    with pytest.raises(RuntimeError, match="a recorder is running"):
        Tap(HostClock()).install()
    wrapped = dist.ProcessGroup.allreduce
    tap.remove()
    assert dist.ProcessGroup.allreduce is not wrapped
    assert not hasattr(dist.Work.wait, "_megatron_ciera_original")
    tap.install()


def test_file_is_a_chrome_trace_that_the_simulator_reads(tap, tmp_path):
    header = {"clock": "host", "world": 4, "ranks_per_node": 4, "features": [], "settings": {}}
    name = dist.group.WORLD.group_name
    file = TraceFile(tmp_path, 0, header, {name: {"role": "data", "per_node": 4}})

    def run():
        handle = dist.all_reduce(torch.zeros(4), async_op=True)
        torch.ones(1000).sum()
        handle.wait()

    file.iteration(record(tap, run), tap.clock)
    file.values(7, {"moe/tokens": 5})
    # Readable while the run goes on, too.
    assert read_trace(str(tmp_path)).metrics["moe/tokens"] == 5
    file.close()
    events = json.loads(file.path.read_text())
    for event in events:
        assert event["ph"] in ("M", "X", "i") and event["pid"] == 0
        assert event["ph"] != "X" or event["dur"] >= 0
    trace = read_trace(str(tmp_path))
    (iteration,) = trace.iterations
    assert [step.what for step in iteration.steps] == ["compute", "launch", "compute", "wait", "compute"]
    (call,) = iteration.calls.values()
    assert (call.role, call.size, call.num_bytes) == ("data", 4, 16)
    parts = sum(step.seconds + step.end - step.begin for step in iteration.steps)
    assert parts == pytest.approx(iteration.seconds)
