"""The commands of docs/tutorial.md, taken from the page and run as one shell session, as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ciera import observe
from tests import warm
from tests.launching import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
SHORT = {"PROCESSES": "2", "BEFORE": "3", "AFTER": "3", "FIT_TOKENS": "2048"}


def commands(page: str) -> str:
    """All bash blocks, in order."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) == 8, "the page has blocks that this test does not expect"
    return "set -euo pipefail\n" + "\n".join(blocks)


@pytest.mark.parametrize(
    "variables",
    [pytest.param(SHORT, id="short"), pytest.param({}, id="as printed", marks=pytest.mark.slow)],
)
def test_the_page_does_what_it_says(tmp_path, variables):
    pytest.importorskip("matplotlib")
    out = tmp_path / "tutorial"
    if variables:
        warm.commands(tmp_path, int(variables["PROCESSES"]))
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MEGATRON_CIERA")}
    session = subprocess.run(
        ["bash", "-c", commands(PAGE.read_text())],
        env=kept | variables | {"OUT": str(out), "PATH": path, "PYTHONPATH": places},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    assert session.returncode == 0, session.stdout[-6000:]

    # The four reports, each as the page describes it.
    placed, both, whole, off = re.findall(r"iterations logged.*?\n\n\S+\.html", session.stdout, re.S)
    for report in (placed, both, whole, off):
        assert re.search(r"losses against the baseline +equal in every bit", report), session.stdout
    assert re.search(r"parameter bits at the end +different", placed)
    assert re.search(r"parameter bits at the end +identical", both)
    assert re.search(r"parameter bits at the end +identical", off)
    assert "rows removed" in placed and "bytes sent" not in placed
    assert "bytes sent" in both and "bytes sent" in whole
    assert "rows removed" not in off and "bytes sent" not in off
    assert "no layer gains" not in session.stdout
    for name in ("placement", "placed", "both", "report", "off"):
        assert (out / f"{name}.html").stat().st_size > 10_000

    ends = re.findall(r"^iteration +(\d+)  lm loss: (\S+)$", session.stdout, re.M)
    stock, *resumed = ends
    assert int(resumed[0][0]) > int(stock[0]) and len(resumed) == 4 and len(set(resumed)) == 1

    last = observe.read_iterations(out / "both")[-1]["metrics"]
    assert last["ciera/bytes_sent"] < last["ciera/bytes_raw"]
    assert "placement file: experts moved in" in (out / "placed" / "log.txt").read_text()
    assert "nothing attached" not in (out / "baseline" / "log.txt").read_text()
