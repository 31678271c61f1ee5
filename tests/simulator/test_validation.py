"""Predictions against measured runs, by hand; and the links measured between two real processes."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from replay_traces import CLUSTER, write

from megatron_ciera.cluster import Link
from megatron_ciera.simulator.features import rates_at
from megatron_ciera.simulator.hardware import hardware
from megatron_ciera.simulator.replay import RECORDED, Target, replay
from megatron_ciera.simulator.trace import read_trace
from megatron_ciera.simulator.validation import Measured, on_link, predict, table
from megatron_ciera.yaml_config import load_config
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
STOCK = Measured("fast", "stock", (6.2, 6.3, 6.4))


def test_what_the_trace_does_not_show_is_added_and_the_error_is_relative(tmp_path):
    trace = read_trace(write(tmp_path))
    same = predict(STOCK, STOCK, trace, CLUSTER)
    slower = on_link(CLUSTER, {"bandwidth_gb_s": 64e-9, "latency_us": 1e-9})
    slow = predict(replace(STOCK, link="slow", seconds=(9.0,)), STOCK, trace, slower)
    # Between nodes go 192 bytes of the reduction, 0.75 s at 256 bytes/s and 3 s at 64, beside 2 s of work, and 256 of
    # the gather, 1 s and 4 s.
    assert slow.seconds == pytest.approx(same.seconds + 1 + 3)
    assert slow.error == pytest.approx(slow.seconds / 9.0 - 1)
    assert same.seconds == pytest.approx(6.3 - 6 + replayed(trace))
    lines = table([same, slow]).splitlines()
    assert lines[2].startswith("| stock | fast | 6300.0 (3.2%) | fast |")
    assert lines[3].startswith("| stock | slow | 9000.0 (0.0%) | fast |")
    assert "Traces of the same link" in lines[-3] and "Traces of another link" in lines[-1]


def replayed(trace):
    return replay(trace, Target(CLUSTER, hardware(CLUSTER), RECORDED, rates_at(1e-4), 4)).seconds


def test_a_runs_own_ratio_and_rows_decide(tmp_path):
    trace = read_trace(write(tmp_path))
    speeds = (1e6, 1e6)

    def seconds(**run):
        return predict(replace(STOCK, **run), STOCK, trace, CLUSTER, speeds).seconds

    raw = seconds()
    assert seconds(variant="ciera", gather_ratio=1.0) == raw
    # Half of 1 s of gathering saved; encoding and decoding are two launches of 20 us.
    assert seconds(variant="ciera", gather_ratio=0.5) == pytest.approx(raw - 0.5 + 40e-6)
    many, few = (seconds(variant="dedup", rows_removed=share) for share in (0.1, 0.4))
    assert few < many < raw


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "yaml"])
def test_links_between_two_processes(as_json, tmp_path):
    command = [
        *warm.torchrun(2),
        str(ROOT / "scripts" / "measure_links.py"),
        "--num-bytes",
        "4194304",
        "--repeats",
        "3",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, *(["--json"] if as_json else [])],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    if as_json:
        link = Link(**json.loads(run.stdout)["intra_node"])
    else:
        level = run.stdout + "  inter_node: {bandwidth_gb_s: 1, latency_us: 1}\n"
        level += "  gpu: CPU\n  nodes: 1\n  gpus_per_node: 2\n  memory_bandwidth_gb_s: 10\n"
        (tmp_path / "pasted.yaml").write_text(level)
        link = load_config(str(tmp_path / "pasted.yaml")).cluster.intra_node
    rates = (link.bandwidth_gb_s, link.reduce_gb_s, link.all_to_all_gb_s)
    assert all(0.001 < rate < 1000 for rate in rates), rates
    assert 1 < link.latency_us < 1e6
