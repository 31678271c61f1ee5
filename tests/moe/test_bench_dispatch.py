"""scripts/bench_dispatch.py in its three forms."""

import json
import math
import subprocess

import numpy as np
import pytest
import torch

from megatron_ciera.moe.replay import relative_error
from tests import warm
from tests.launching import ROOT, TINY, launch

SCRIPT = str(ROOT / "scripts" / "bench_dispatch.py")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two layers of 16 experts: expert e is selected with e + 8 three times out of four."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 8, (2, 2048))
    coupled = rng.random((2, 2048)) < 0.75
    second = np.where(coupled, first + 8, 8 + (first + rng.integers(1, 8, (2, 2048))) % 8)
    path = tmp_path_factory.mktemp("trace") / "trace.npz"
    np.savez(path, top_indices=np.stack([first, second], axis=2).astype(np.uint8))
    return path


COMMON = ["--num-experts", "16", "--fit-tokens", "512", "--skip-tokens", "1024", "--hidden-size", "32"]


def test_counting(trace):
    words = [trace, *COMMON, "--count", 2, 4, "--ranks-per-node", 2, "--json"]
    process = subprocess.run(
        [*warm.python(), SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=200
    )
    assert process.returncode == 0, process.stderr[-2000:]
    result = json.loads(process.stdout)
    assert [entry["expert_parallel_size"] for entry in result["sizes"]] == [2, 4]
    for entry in result["sizes"]:
        # Contiguous halves always split a token.
        assert entry["contiguous"]["rows_per_rank"] == 2.0
        assert 1.0 < entry["correlated"]["rows_per_rank"] < 1.5
        assert entry["correlated"]["bytes_per_rank"] < entry["contiguous"]["bytes_per_rank"]
    assert result["sizes"][1]["correlated"]["internode_bytes_per_node"] > 0


def test_nan_is_never_within_a_bound():
    exact = torch.ones(3)
    assert relative_error(torch.tensor([1.0, 1.0, 1.5]), exact) == pytest.approx(0.5 / math.sqrt(3))
    assert relative_error(torch.tensor([1.0, math.nan, 1.0]), exact) == math.inf


@pytest.mark.slow
def test_replay(tmp_path, trace):
    words = [trace, *COMMON, "--tokens", 256, "--ffn-hidden-size", 16, "--warmup", 1, "--iterations", 2]
    out = tmp_path / "out.json"
    launch(tmp_path, 2, [*words, "--output", out], script=(SCRIPT,)).check()
    result = json.loads(out.read_text())
    assert result["parity"] is True
    names = [variant["variant"] for variant in result["variants"]]
    assert names == ["stock", "dedup", "dedup + correlated", "stock again"]
    stock, dedup, placed, _ = result["variants"]
    assert placed["bytes"] < dedup["bytes"] <= 1.01 * stock["bytes"]


@pytest.mark.slow
def test_training(tmp_path):
    out = tmp_path / "out.json"
    words = ["--training", "--iterations", 3, "--fit-tokens", 1024, "--output", out, "--"]
    flags = [*TINY, "--expert-model-parallel-size", 2, "--seq-length", 512, "--max-position-embeddings", 512]
    flags += ["--vocab-size", 1023, "--train-iters", 2000, "--global-batch-size", 8]
    launch(tmp_path, 2, [*words, *flags], script=(SCRIPT,), timeout=500).check()
    found = json.loads(out.read_text())["phases"]
    names = ["stock", "dedup", "stock", "dedup", "dedup, contiguous placement", "dedup + correlated"]
    assert [phase["variant"] for phase in found] == names
    assert [len(phase["all"]) for phase in found] == [2, 2, 2, 2, 5, 2]
    assert found[-1]["rows_sent"] < found[-1]["rows_stock"] == 2 * 2 * 8 * 512
