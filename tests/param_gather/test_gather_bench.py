"""The benchmark's data: real words tiled to a shard, changes thinned to a given share."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_ciera.param_gather.bench import shard_runs, thin, tile_shard

STEP = {
    "layers.0.input_layernorm.weight": np.arange(768, dtype=np.uint16),
    "layers.0.mlp.experts.5.linear_fc1.weight": np.arange(10000, dtype=np.uint16),
}


@pytest.mark.parametrize("num_values", [10768, 128 * 1000, 128 * 77])
def test_shard_holds_every_parameter_in_one_run(num_values):
    shard = tile_shard(STEP, num_values, turn=0).numpy().view(np.uint16)
    runs = shard_runs(STEP, num_values)
    assert shard.size == num_values == runs[-1].end
    assert [run.kind for run in runs] == ["norm", "expert"]
    for run, values in zip(runs, STEP.values(), strict=True):
        assert run.start % 64 == 0
        assert np.array_equal(shard[run.start : run.end], np.resize(values, run.end - run.start))


def test_ranks_hold_the_same_values_from_another_start():
    first, second = tile_shard(STEP, 10768, 0), tile_shard(STEP, 10768, 1)
    assert not first.equal(second)
    assert first.sort().values.equal(second.sort().values)


def test_thinning_takes_changes_back():
    after = {name: values + np.uint16(1) for name, values in STEP.items()}
    thinned = thin([STEP, after, STEP], 0.78)
    for before, step, target in zip(thinned, thinned[1:], (after, STEP), strict=False):
        same = sum(int((before[n] == step[n]).sum()) for n in STEP) / 10768
        assert same == pytest.approx(0.78, abs=0.02)
        assert all(((step[n] == before[n]) | (step[n] == target[n])).all() for n in STEP)


@pytest.mark.slow
def test_emulated_wire_gathers_the_right_bits(tmp_path):
    for step in range(3):
        words = {name: values + np.uint16(step) for name, values in STEP.items()}
        np.savez(tmp_path / f"{step}.npz", **words)
    script = Path(__file__).resolve().parents[2] / "scripts" / "emulate_param_gather.py"
    files = [str(tmp_path / f"{step}.npz") for step in range(3)]
    command = [sys.executable, str(script), "--num-values", "100000", "--repeats", "2", "--links", "25:30"]
    found = subprocess.run([*command, "--weights", *files], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr[-3000:]
    assert [line.split()[1] for line in found.stdout.splitlines()] == ["delta", "auto"]
