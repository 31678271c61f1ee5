"""Runs a training command without and with some flags, and asserts that nothing changed.

    scripts/loss_compare.py --with "--ciera" [--iterations N] -- torchrun … scripts/pretrain_gpt.py <Megatron flags>

Compares every logged loss, every gradient norm (exact values, so give --log-interval 1) and the bits of every
parameter on every rank at the end. Exit code 0: equal. 1: different. 2: a run failed, logged nothing to compare, or
never did what the flags are for: --ciera compresses nothing in its warm-up, so equal bits would prove nothing.
On GPUs give --deterministic-mode; --stock-twice shows that two runs without the flags are equal at all.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

from megatron_ciera.comparison import compare, observe_run, without_effect
from megatron_ciera.errors import ConfigurationError, check_folder
from placement.cli_common import positive_int


def main(argv: list[str] | None = None) -> int:
    """The command line of scripts/loss_compare.py; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--with", dest="flags", metavar="FLAGS", help="flags to add, in one string")
    parser.add_argument("--without", default="", help="flags for the other run instead, in one string")
    parser.add_argument(
        "--iterations", type=positive_int, default=None, help="appends --train-iters N to both"
    )
    parser.add_argument("--stock-twice", action="store_true", help="compare two plain runs as well")
    parser.add_argument("--output", type=Path, default=None, help="keep logs and observations here")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND…")
    options = parser.parse_args(_with_values_joined(sys.argv[1:] if argv is None else argv))
    if options.flags is None:
        parser.error(
            '--with: found none, wanted the flags to compare a run with, as in --with "--ciera". Runs that are '
            "over are compared by report_run.py LOG --baseline LOG (ciera-report-run)"
        )
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command to run: give it after --")
    if options.iterations is not None:
        command += ["--train-iters", str(options.iterations)]
    try:
        if options.output is not None:
            check_folder("--output", options.output)
        with tempfile.TemporaryDirectory() as scratch:
            return _compare(options, command, options.output or Path(scratch))
    except ConfigurationError as error:
        parser.error(str(error))


def _with_values_joined(argv: list[str]) -> list[str]:
    """`--with "--ciera"` as `--with=--ciera`: argparse takes a value of one word that starts with - for a flag."""
    joined, words = [], iter(argv)
    for word in words:
        if word == "--":
            return [*joined, word, *words]
        value = next(words, None) if word in ("--with", "--without") else None
        joined.append(word if value is None else f"{word}={value}")
    return joined


def _compare(options, command: list[str], folder: Path) -> int:
    # The flags under test first: a mistake in them shows before anything else has been trained.
    runs = {"with": shlex.split(options.flags), "without": shlex.split(options.without)}
    if options.stock_twice:
        runs["again"] = runs["without"]
    for name, flags in runs.items():
        log = folder / name / "log.txt"
        code = observe_run([*command, *flags], folder / name, log)
        if code:
            said = log.read_text(errors="replace")
            print(f"{said[-4000:]}\nthe run '{name}' ended with exit code {code}", file=sys.stderr)
            return 2
    try:
        results = {"comparison": compare(folder / "without", folder / "with").as_dict()}
        if options.stock_twice:
            results["stock_twice"] = compare(folder / "again", folder / "without").as_dict()
        idle = without_effect(folder / "without", folder / "with")
    except (ValueError, OSError) as error:
        print(f"error: the runs cannot be compared: {error}. Give --log-interval 1", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps({"with": options.flags, "command": command, "without_effect": idle, **results}))
    else:
        for name, found in results.items():
            print(f"{name}: {_sentence(found)}")
        if options.output is not None:
            runs = f"{folder / 'with'} --baseline {folder / 'without'}"
            print(f"both runs on a page: report_run.py {runs}  (ciera-report-run)")
    if idle:
        print(f"error: the comparison proves nothing: {'; '.join(idle)}", file=sys.stderr)
        return 2
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
