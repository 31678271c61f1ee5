"""Migration on four processes: see migration_worker.py."""

import json
from pathlib import Path

import pytest

from tests.launching import launch

WORKER = Path(__file__).with_name("migration_worker.py")
CHECKS = (
    "moved_something",
    "every_expert_keeps_its_bits",
    "mapping_is_the_map",
    "back_to_every_bit",
    "failure_wrote_nothing",
    "failure_kept_maps",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("migration")
    launch(folder, 4, [folder], script=(str(WORKER),), timeout=500).check()
    return folder


@pytest.fixture(scope="module")
def results(folder):
    return json.loads((folder / "results.json").read_text())


def test_all_cases_ran(results):
    assert len(results) == 3


@pytest.mark.parametrize("check", CHECKS)
def test_holds(results, check):
    for case, found in results.items():
        assert found[check] is True, case


def test_masters_and_both_moments_move(results):
    for case, found in results.items():
        assert found["masters_and_moments"] == ["exp_avg", "exp_avg_sq", "master", "weight"], case


def test_a_failure_on_one_rank_is_known_on_all(results):
    for case, found in results.items():
        assert (
            "layer 0 keeps its placement, because rank 1 failed: MemoryError: no room"
            in found["failed_layer"]
        ), case


def test_what_breaks_on_one_rank_is_said_on_all(folder):
    """Before a move: a recorder that cannot be read is the fit's answer; another placement file ends the run."""
    alike = json.loads((folder / "alike.json").read_text())
    assert len(alike["recorder"]) == 4
    for pending, reason in alike["recorder"]:
        assert pending and "rank 1 could not collect its routing: RuntimeError: Sizes of tensors" in reason
    wanted = "--placement-file p: rank 1 found b, rank 0 found a; needs the same file"
    assert alike["file"] == [wanted] * 4
