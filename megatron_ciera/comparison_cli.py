"""Runs a training command without and with some flags, and asserts that nothing changed.

    scripts/loss_compare.py --with "--ciera" [--iterations N] -- torchrun … scripts/pretrain_gpt.py <Megatron flags>

Compares every logged loss, every gradient norm (exact values, so give --log-interval 1) and the bits of every
parameter on every rank at the end. Exit code 0: equal. 1: different. 2: a run failed, or logged nothing to compare.
On GPUs give --deterministic-mode; --stock-twice shows first that two runs without the flags are equal at all.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from megatron_ciera.comparison import compare, observe_run


def main(argv: list[str] | None = None) -> int:
    """The command line of scripts/loss_compare.py; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--with", dest="flags", required=True, help="flags to add, in one string")
    parser.add_argument("--without", default="", help="flags for the other run instead, in one string")
    parser.add_argument("--iterations", type=int, default=None, help="appends --train-iters N to both")
    parser.add_argument("--stock-twice", action="store_true", help="compare two plain runs first")
    parser.add_argument("--output", type=Path, default=None, help="keep logs and observations here")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND…")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command to run: give it after --")
    if options.iterations is not None:
        command += ["--train-iters", str(options.iterations)]
    with tempfile.TemporaryDirectory() as scratch:
        return _compare(options, command, options.output or Path(scratch))


def _compare(options, command: list[str], folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    runs = {"without": shlex.split(options.without), "with": shlex.split(options.flags)}
    if options.stock_twice:
        runs = {"again": runs["without"], **runs}
    for name, flags in runs.items():
        code = observe_run([*command, *flags], folder / name, folder / f"{name}.log")
        if code:
            log = (folder / f"{name}.log").read_text(errors="replace")
            print(f"{log[-4000:]}\nthe run '{name}' ended with exit code {code}", file=sys.stderr)
            return 2
    try:
        results = {"comparison": compare(folder / "without", folder / "with").as_dict()}
        if options.stock_twice:
            results["stock_twice"] = compare(folder / "again", folder / "without").as_dict()
    except (ValueError, OSError) as error:
        print(f"error: the runs cannot be compared: {error}. Give --log-interval 1", file=sys.stderr)
        return 2
    report = {"with": options.flags, "command": command, **results}
    if options.json:
        print(json.dumps(report))
    else:
        for name, found in results.items():
            print(f"{name}: {_sentence(found)}")
    return 0 if all(found["equal"] for found in results.values()) else 1


def _sentence(found: dict) -> str:
    if found["equal"]:
        return (
            f"equal over {found['iterations']} iterations: losses, gradient norms and the bits of "
            f"{found['parameters']} parameters (all ranks)"
        )
    return (
        f"DIFFERENT: {found['first_difference']} (losses differ by up to {found['loss_max_abs_diff']}, gradient "
        f"norms by up to {found['grad_norm_max_abs_diff']}, final parameters identical: {found['bitwise_identical']})"
    )
