"""Transformer Engine's layers and models against stock and fp32: the workers of tests/moe and tests/shuffle."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.launching import ROOT, launch, shared_gpu
from tests.moe.names import VARIABLE
from tests.moe.test_migration import CHECKS
from tests.shuffle.test_shuffle_layer import check
from tests.te.te_runs import MARKS

pytestmark = MARKS
BF16_STEP = 2.0**-8
SHUFFLES = [
    "TP 2, micro-batch 2",
    "TP 2, one dense layer",
    "TP 2, full recompute",
    "TP 2, selective recompute",
]
SHUFFLES += ["TP 2, micro-batch 2, trained"]
WORKERS = {
    "layer": ("moe/layer_worker.py", []),
    "migration": ("moe/migration_worker.py", []),
    "shuffle": ("shuffle/shuffle_worker.py", SHUFFLES),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every worker on two ranks, side by side; its folder once it has ended well."""
    places: dict[str, Path] = {name: tmp_path_factory.mktemp(name) for name in WORKERS}

    def start(name):
        script, words = WORKERS[name]
        folder = places[name]
        variables = {VARIABLE: "transformer_engine", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **shared_gpu()}
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        # These many shapes reach torch.compile's limit: an activation of inputs without gradients, as recomputation
        # has them, then runs uncompiled and rounds after each operation; outputs differ by that.
        variables["TORCHDYNAMO_DISABLE"] = "1"
        run = launch(
            folder, 2, [folder, *words], script=(str(ROOT / "tests" / script),), timeout=560, **variables
        )
        return folder, run

    with ThreadPoolExecutor(len(WORKERS)) as pool:
        ended = dict(zip(WORKERS, pool.map(start, WORKERS), strict=True))
    return lambda name: ended[name][1].check() and ended[name][0]


def of_ranks(folder: Path) -> list[dict]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_deduplicated_layers(folders):
    """Within twice plain bf16's error against fp32; repeated and recomputed the same bits; top-2 has stock's."""
    results, bounded = of_ranks(folders("layer")), 0
    for of_rank in results:
        assert len(of_rank) == 30
        for case, result in of_rank.items():
            if not isinstance(result, dict):
                assert result == [], case  # placement in front of a stock dispatcher
                continue
            assert result["rows"] == result["pairs"] and result["assignments"] == result["selected"], case
            assert result["repeat"] == [] and result["recompute"] == [], case
            for name, difference in result["against_stock"].items():
                assert difference <= (0.0 if case.startswith("top2") else BF16_STEP), (case, name)
            for name, error in result.get("error", {}).items():
                assert error <= 2 * result["stock_error"][name], (case, name)
                bounded += 1
    assert bounded >= 2 * 6 * 2 * 5


def test_migration_leaves_every_bit(folders):
    """There and back: weights, masters, moments, and what precision-aware FusedAdam keeps in their place."""
    results = json.loads((folders("migration") / "results.json").read_text())
    assert len(results) == 4
    for case, found in results.items():
        master = "master_param" if "precision-aware" in case else "master"
        assert found["masters_and_moments"] == ["exp_avg", "exp_avg_sq", master, "weight"], case
        for name in CHECKS:
            assert found[name] is True, (case, name)


def test_shuffled_models(folders):
    """Losses of the same bits, gradients within twice the error of plain bf16, recomputed or not."""
    results = of_ranks(folders("shuffle"))
    assert all(sorted(of_rank) == sorted(SHUFFLES) for of_rank in results)
    check(results)
