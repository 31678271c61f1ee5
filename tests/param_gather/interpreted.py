"""Cases that need Triton's interpreter: a process for each codec runs all of its cases, the two side by side."""

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_selected(request, worker: str) -> dict[tuple[str, str], str]:
    """(codec, case): what went wrong, or nothing; of the tests of this module that are selected and ask for it.

    request: of a module's fixture, whose tests have the parameters `name` and `case`.
    """
    pytest.importorskip("triton")
    cases: dict[str, list[str]] = {}
    for item in request.session.items:
        if item.path == request.path and request.fixturename in item.fixturenames:
            cases.setdefault(item.callspec.params["name"], []).append(item.callspec.params["case"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}

    def run(name: str) -> dict[tuple[str, str], str]:
        command = [sys.executable, str(HERE / worker), name, *cases[name]]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        if finished.returncode != 0:
            return {(name, case): finished.stdout + finished.stderr for case in cases[name]}
        found = json.loads(finished.stdout)
        return {(name, case): found[case] for case in cases[name]}

    with ThreadPoolExecutor(len(cases)) as pool:
        return {case: text for found in pool.map(run, cases) for case, text in found.items()}


def report(check: Callable[[str, str], None], name: str, cases: Sequence[str]) -> None:
    """In the worker: prints what `check(name, case)` raises, for each case."""
    found = {}
    for case in cases:
        try:
            check(name, case)
            found[case] = ""
        except (Exception, SystemExit):
            found[case] = traceback.format_exc()
    print(json.dumps(found))
