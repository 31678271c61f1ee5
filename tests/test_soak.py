"""A long run with every feature, refits, saves, resumes and faults, against one of stock Megatron.

MEGATRON_CIERA_SOAK_ITERATIONS=2000 is the run of docs/results/soak.md; by default it is a tenth of that.
With top-2 and without clipping every feature that runs here promises the bits of stock: all losses of all iterations
and every tensor of the last checkpoint are compared.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ciera import observe
from tests.launching import ROOT, TINY
from tests.moe.placed_runs import checkpoint, same_checkpoint

ITERATIONS = int(os.environ.get("MEGATRON_CIERA_SOAK_ITERATIONS", "200"))
TENTH = ITERATIONS // 10
WARMUP = 50  # iterations in which memory still grows after a start, stock's too: by about 50 MB
SCRIPT = ROOT / "tests" / "soak" / "soak_training.py"
FLAGS = [
    *TINY,
    *("--seq-length", "128", "--max-position-embeddings", "128", "--global-batch-size", "8"),
    *("--clip-grad", "0", "--expert-model-parallel-size", "2", "--dist-ckpt-optim-fully-reshardable"),
    *("--train-iters", ITERATIONS, "--lr-decay-iters", ITERATIONS, "--save-interval", TENTH),
]
FEATURES = [
    *("--ciera", "--ciera-warmup-iters", 4, "--ciera-no-selection", "--ciera-verify-interval", 50),
    *("--overlap-grad-reduce", "--overlap-param-gather", "--correlated-placement"),
    *(
        "--placement-fit-iteration",
        3,
        "--placement-fit-tokens",
        2048,
        "--placement-refit-interval",
        TENTH,
    ),
]


@dataclass(frozen=True)
class Part:
    """One start of the run: where it stops by itself, and the fault that stops it otherwise."""

    name: str
    faults: str = ""
    exit_at: int | None = None
    fails: bool = False


PARTS = (
    Part("first", f"fit:{TENTH}", exit_at=2 * TENTH),
    Part("killed", f"kill:{3 * TENTH + 1}", fails=True),
    Part("damaged", f"payload:{5 * TENTH + 2}", fails=True),
    Part("last"),
)


def start(folder: Path, name: str, words: list, faults: str = "") -> int:
    place = folder / name
    place.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", SCRIPT]
    environment = os.environ | {
        observe.VARIABLE: str(place),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "SOAK_FAULTS": faults,
        "SOAK_MEMORY": str(place),
    }
    # To a file: helper processes of a killed rank would keep a pipe open.
    with open(place / "log", "w") as log:
        command = list(map(str, [*command, *FLAGS, *words]))
        return subprocess.run(command, stdout=log, stderr=log, env=environment, timeout=3600).returncode


@pytest.fixture(scope="module")
def soak(tmp_path_factory):
    """Folder with the parts and the stock run."""
    folder = tmp_path_factory.mktemp("soak")
    for part in PARTS:
        words = [*FEATURES, "--save", folder / "saved"]
        if part is not PARTS[0]:
            words += ["--load", folder / "saved"]
        if part.exit_at:
            words += ["--exit-interval", part.exit_at]
        code = start(folder, part.name, words, part.faults)
        log = (folder / part.name / "log").read_text()
        assert (code != 0) == part.fails, log[-6000:]
    assert start(folder, "stock", ["--save", folder / "stock_saved"]) == 0, (
        folder / "stock" / "log"
    ).read_text()[-6000:]
    return folder


@pytest.mark.slow
def test_every_loss_has_the_bits_of_stock(soak):
    stock = {record["iteration"]: record["losses"] for record in observe.read_iterations(soak / "stock")}
    assert list(stock) == list(range(1, ITERATIONS + 1))
    seen = set()
    for part in PARTS:
        for record in observe.read_iterations(soak / part.name):
            if part.name == "damaged" and record["iteration"] >= 5 * TENTH + 2:
                continue  # the step that reads damaged blocks, before all ranks stop
            assert record["losses"] == stock[record["iteration"]], (part.name, record["iteration"])
            seen.add(record["iteration"])
    assert seen == set(stock)


@pytest.mark.slow
def test_last_checkpoint_has_the_bits_of_stock(soak):
    same_checkpoint(checkpoint(soak / "stock_saved", ITERATIONS), checkpoint(soak / "saved", ITERATIONS))


@pytest.mark.slow
def test_experts_moved_and_faults_happened(soak):
    logs = {part.name: (soak / part.name / "log").read_text() for part in PARTS}
    for part in PARTS:
        for fault in filter(None, [part.faults.split(":")[0]]):
            assert f"soak: {fault} at iteration" in logs[part.name], part.name
    assert "the fit ended with code -9" in logs["first"]
    moved = [
        int(found)
        for found in re.findall(r"applied after .*experts moved in (\d+) of", "".join(logs.values()))
    ]
    assert sum(moved) > 0
    assert "damage" in logs["damaged"]
    # Nothing of a broken part is on record after its last good checkpoint.
    last = observe.read_iterations(soak / "damaged")[-1]["iteration"]
    assert last <= 5 * TENTH + 3


@pytest.mark.slow
def test_memory_is_flat(soak):
    """The second half of the last part against its first: at most 2 % and 8 MiB more than stock grows."""
    grown = {name: growth(soak / name, 5 * TENTH + WARMUP) for name in ("last", "stock")}
    assert grown["last"] <= max(grown["stock"], 0) + 0.02 * resident(soak / "last") + 8 * 2**20, grown


def samples(place: Path, after: int) -> list[list[list[int]]]:
    return [
        [pair for pair in map(json.loads, file.read_text().splitlines()) if pair[0] > after]
        for file in sorted(place.glob("rank*.jsonl"))
    ]


def growth(place: Path, after: int) -> float:
    """Bytes between the medians of the two halves of what was sampled, the rank that grew most."""
    found = []
    for rank in samples(place, after):
        values = [value for _, value in rank]
        half = len(values) // 2
        found.append(statistics.median(values[half:]) - statistics.median(values[:half]))
    return max(found)


def resident(place: Path) -> int:
    return max(value for rank in samples(place, 0) for _, value in rank)
