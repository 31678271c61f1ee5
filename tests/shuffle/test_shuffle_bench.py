"""The benchmark on CPU: parity holds, every variant is timed, and the planner finds its twin's owners."""

import json

import numpy as np
import pytest

from tests.launching import ROOT, launch


@pytest.mark.slow
def test_benchmark_on_two_processes(tmp_path):
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 8, 512)
    # Experts of a layer depend on the token's kind, so that layers predict each other.
    experts = np.stack(
        [np.stack([kind, 8 + (kind + layer + rng.integers(0, 2, 512)) % 8], 1) for layer in range(5)]
    )
    np.savez(tmp_path / "trace.npz", step1=experts)
    words = "--num-experts 16 --fit-tokens 256 --skip-tokens 256 --seq-length 32 --micro-batch-size 2 "
    words += "--hidden-size 32 --ffn-hidden-size 16 --num-attention-heads 4 --warmup 1 --iterations 2 "
    words += "--planner-ranks 2 4"
    flags = [tmp_path / "trace.npz", *words.split(), "--output", tmp_path / "out.json"]
    launch(
        tmp_path / "run", 2, flags, script=(str(ROOT / "scripts" / "bench_shuffle.py"),), timeout=600
    ).check()
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["parity"] and result["same_losses"] and 0 < result["stock_error"] < 0.1
    assert [entry["ranks"] for entry in result["planner"] if entry["same_as_twin"]] == [2, 4]
    steps = {entry["variant"]: entry for entry in result["steps"]}
    assert list(steps) == [
        "stock",
        "dedup + placement",
        "+ shuffle",
        "+ shuffle, partial sums",
        "stock again",
    ]
    assert steps["+ shuffle"]["locality"] > steps["+ shuffle"]["locality_by_position"] + 0.2
