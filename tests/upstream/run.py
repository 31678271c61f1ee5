"""Runs Megatron-LM's own unit tests: without this extension, with it inactive, with it active.

    make test-upstream MEGATRON_LM_PATH=path/to/Megatron-LM     # a checkout of core_v0.19.0; no GPU is used
    MEGATRON_LM_PATH=… python tests/upstream/run.py [--gpu] [--groups moe …] [--modes absent …] [--files moe_layer …]

The tests are taken from the checkout. What each mode means: upstream_plugin.py; what is run: selection.py. Ends
with 1 if a test has another outcome with the extension than without it. docs/upstream_tests.md has the results.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from selection import (
    GROUPS,
    LEFT_OUT_ON_CPU,
    LEFT_OUT_ON_GPU,
    NOT_WHEN_ACTIVE,
    ON_GPU,
    PROCESSES,
    PROCESSES_ON_GPU,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ciera import cpu  # noqa: E402

MODES = ("absent", "inactive", "active")
VARIABLE = "MEGATRON_LM_PATH"
UNIT_TESTS = "tests/unit_tests"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--files", nargs="+", default=[""], help="parts of names; default: all of the groups")
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "upstream")
    parser.add_argument(
        "--gpu", action="store_true", help="over NCCL; ranks share GPUs where there are fewer"
    )
    parser.add_argument("--timeout", type=int, default=1200, help="seconds for one group in one mode")
    args = parser.parse_args(argv)
    checkout = Path(os.environ.get(VARIABLE, ""))
    if not (checkout / UNIT_TESTS).is_dir():
        parser.error(
            f"{VARIABLE}: found {os.environ.get(VARIABLE)!r}, needs a Megatron-LM checkout with {UNIT_TESTS}/. "
            "Clone Megatron-LM at the tag core_v0.19.0 and name its folder."
        )
    if args.gpu and cpu.is_needed():
        parser.error("--gpu: found no GPU, needs one. Leave --gpu out to run what runs on CPU.")
    differences = 0
    for group in args.groups:
        files = [name for name in files_of(group, args.gpu) if any(part in name for part in args.files)]
        if not files:
            continue
        found = {}
        for mode in args.modes:
            folder = args.output.resolve() / group / mode
            run_group(checkout.resolve(), group, files, mode, folder, args.timeout, args.gpu)
            found[mode] = outcomes(folder, args.gpu)
            say_summary(group, mode, found[mode], attached(folder))
        differences += say_differences(found)
    (args.output / "table.md").write_text(table(args.output, args.gpu))
    return 1 if differences else 0


def files_of(group: str, gpu: bool) -> tuple[str, ...]:
    return GROUPS[group] + (ON_GPU[group] if gpu else ())


def run_group(
    checkout: Path, group: str, files: list[str], mode: str, folder: Path, timeout: int, gpu: bool
) -> None:
    """One torchrun of pytest over files of the group; each rank writes its outcomes to `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
    launcher += [str(PROCESSES_ON_GPU if gpu else PROCESSES[group])]
    pytest = ["pytest", "-p", "upstream_plugin", "-p", "no:cacheprovider", "-c", os.devnull, "-q"]
    command = [
        *(sys.executable, "-m", *launcher, "-m", *pytest, "--continue-on-collection-errors"),
        *("--rootdir", str(checkout), *(f"{UNIT_TESTS}/{name}" for name in files)),
    ]
    variables = {
        **os.environ,
        "CIERA_UPSTREAM_MODE": mode,
        "CIERA_UPSTREAM_RESULTS": str(folder),
        "MEGATRON_CIERA_DEVICE": "cuda" if gpu else "cpu",
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(ROOT), str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        # A checkout may have no bytecode, which every rank would then make again in each run.
        "PYTHONPYCACHEPREFIX": str(folder.parents[1] / "bytecode"),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=checkout, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            print(
                f"{group}, {mode}: stopped after {timeout} s; what was not reached is missing from the results"
            )
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def outcomes(folder: Path, gpu: bool) -> dict[str, tuple[str, str]]:
    """(outcome, reason) of each test: failed if it failed on any rank, else passed if it passed on any."""
    left_out = LEFT_OUT_ON_GPU if gpu else LEFT_OUT_ON_CPU
    by_test: dict[str, dict[str, str]] = {}
    for line in _lines(folder):
        if "test" in line and not any(name in line["test"] for name in left_out):
            by_test.setdefault(line["test"], {}).setdefault(line["outcome"], line["reason"])
    order = ("failed", "passed", "skipped")
    worst = {test: next(kind for kind in order if kind in kinds) for test, kinds in by_test.items()}
    return {test: (kind, by_test[test][kind]) for test, kind in worst.items()}


def attached(folder: Path) -> Counter:
    """What the active extension did, summed over ranks; each line has what was done so far."""
    total = Counter()
    for path in folder.glob("rank*.jsonl"):
        found = [counts for line in _lines_of(path) if (counts := line.get("counts")) is not None]
        total.update(found[-1] if found else {})
    return total


def _lines(folder: Path):
    for path in sorted(folder.glob("rank*.jsonl")):
        yield from _lines_of(path)


def _lines_of(path: Path):
    for line in path.read_text().splitlines():
        yield json.loads(line)


def say_summary(group: str, mode: str, found: dict, counts: Counter) -> None:
    total = Counter(kind for kind, _ in found.values())
    print(f"{group}, {mode}: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    if counts:
        print("    " + ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    files: dict[str, Counter] = {}
    for test, (kind, _) in found.items():
        files.setdefault(test.split("::")[0].removeprefix(UNIT_TESTS + "/"), Counter())[kind] += 1
    for name, kinds in files.items():
        print(f"    {name}: {kinds['passed']} / {kinds['failed']} / {kinds['skipped']}")
    sys.stdout.flush()


def say_differences(found: dict[str, dict]) -> int:
    """Prints each test whose outcome is not that of the first mode; returns their number."""
    first, *others = found
    number = 0
    for mode in others:
        for test in sorted({*found[first], *found[mode]}):
            before, after = (found[each].get(test, ("not reached", "")) for each in (first, mode))
            is_left_out = mode == "active" and any(name in test for name in NOT_WHEN_ACTIVE)
            if before[0] != after[0] and not is_left_out:
                number += 1
                print(f"DIFFERENT {test}: {before[0]} {first}, {after[0]} {mode}: {after[1]}")
    return number


def table(output: Path, gpu: bool) -> str:
    """Markdown: passed / failed / skipped of each file in each mode whose results are in the folder."""
    lines = ["| file | " + " | ".join(MODES) + " |", "| --- | " + "--- | " * len(MODES)]
    for group in GROUPS:
        found = {mode: outcomes(output / group / mode, gpu) for mode in MODES}
        for name in files_of(group, gpu):
            cells = []
            for mode in MODES:
                tests = [kind for test, (kind, _) in found[mode].items() if f"/{name}::" in test]
                kinds = [str(tests.count(kind)) for kind in ("passed", "failed", "skipped")]
                cells.append(" / ".join(kinds) if tests else "not run")
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
