"""Folders that tools and runs write to: taken if there or to be made, else named with what is in the way."""

import argparse
import os
import subprocess
import sys

import pytest

from megatron_ciera.errors import ConfigurationError, check_folder, output_folder
from tests.launching import ROOT


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """By name: (path, what the message says), None for a path that can be written."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "locked").mkdir()
    # As a read-only file system answers; root may write to any other.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "locked")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone" / "folder")
    (tmp_path / "linked").symlink_to(tmp_path / "folder")
    return {
        "folder": (tmp_path / "folder", None),
        "linked": (tmp_path / "linked", None),
        "new": (tmp_path / "a" / "b" / "c", None),
        "file": (tmp_path / "file", "which is a file"),
        "below a file": (tmp_path / "file" / "a" / "b", f"below {tmp_path}/file, which is a file"),
        "dead link": (tmp_path / "nowhere", "which is a link to nowhere"),
        "below a dead link": (
            tmp_path / "nowhere" / "a",
            f"below {tmp_path}/nowhere, which is a link to nowhere",
        ),
        "no right to write": (tmp_path / "locked" / "a", f"below {tmp_path}/locked, which cannot be written"),
    }


NAMES = "folder|linked|new|file|below a file|dead link|below a dead link|no right to write".split("|")


@pytest.mark.parametrize("name", NAMES)
def test_folders(paths, name):
    path, text = paths[name]
    if text is None:
        check_folder("--ciera-record", path)
        assert output_folder(str(path)) == path
        path.mkdir(parents=True, exist_ok=True)  # what was promised
        return
    with pytest.raises(ConfigurationError) as ours:
        check_folder("--ciera-record", path)
    with pytest.raises(argparse.ArgumentTypeError) as tools:
        output_folder(str(path))
    said = f"found {path}"
    assert str(ours.value).startswith(f"--ciera-record: {said}") and str(tools.value).startswith(said)
    assert text in str(ours.value) and "needs a folder, there or to be made. Name another" in str(tools.value)


@pytest.mark.parametrize(
    "script, words",
    [
        ("quickstart.py", []),
        ("measure_node.py", ["--stages"]),
        ("validate_simulator.py", []),
        ("report_param_gather.py", ["--weights", "a.npz", "b.npz"]),
    ],
)
def test_scripts_ask_before_they_work(script, words):
    command = [sys.executable, str(ROOT / "scripts" / script), *words, "--output", __file__]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert f"argument --output: found {__file__}, which is a file, needs a folder" in run.stderr
