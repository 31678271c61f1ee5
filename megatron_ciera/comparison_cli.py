"""Runs a training command with and without some flags, and asserts that they change nothing.

    scripts/loss_compare.py --with "--ciera" [--iterations N] -- torchrun … scripts/pretrain_gpt.py <Megatron flags>

Compares every logged loss, every gradient norm (exact values, so give --log-interval 1) and the bits of every
parameter on every rank at the end. Exit code 0: equal. 1: different. 2: a run failed, logged nothing to compare, or
never did what the flags are for: --ciera compresses nothing in its warm-up, so equal bits would prove nothing.
On GPUs give --deterministic-mode; --stock-twice shows that two runs without the flags are equal at all.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from megatron_ciera import observe
from megatron_ciera.comparison import compare, effects, observe_run
from megatron_ciera.errors import output_folder
from megatron_ciera.install import DISABLE
from placement.cli_common import positive_int

_REPORT = {"loss_compare.py": "report_run.py", "ciera-loss-compare": "ciera-report-run"}
_KEEP_SCHEDULE = "--use-checkpoint-opt_param-scheduler"
_OTHER_SCHEDULE = re.compile(
    r"OptimizerParamScheduler: class input value (.+) and checkpoint ?value (.+) for (.+) do not match"
)


def main(argv: list[str] | None = None) -> int:
    """The command line of scripts/loss_compare.py; returns the exit status."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory() as scratch:
        return _compare(options, options.output or Path(scratch))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--with", dest="flags", type=_words, metavar="FLAGS", help="flags to add, in one string"
    )
    parser.add_argument(
        "--without",
        type=_words,
        default=[],
        metavar="FLAGS",
        help="flags for the other run instead, in one string",
    )
    parser.add_argument(
        "--iterations",
        type=positive_int,
        default=None,
        metavar="N",
        help="sets --train-iters N in both. Counted from the first iteration, also with --load: a checkpoint at "
        "iteration N leaves nothing to train, and one made under other --train-iters needs "
        f"{_KEEP_SCHEDULE} in the command",
    )
    parser.add_argument("--stock-twice", action="store_true", help="compare two plain runs as well")
    parser.add_argument(
        "--output", type=output_folder, default=None, help="keep logs and observations in this folder"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND…")
    options = parser.parse_args(_with_values_joined(argv))
    if options.flags is None:
        parser.error(
            '--with: found none, needs the flags to compare a run with, as in --with "--ciera". Runs that are '
            f"over are compared by {_report_program()} LOG --baseline LOG"
        )
    if options.flags == options.without:
        parser.error(
            f"--with: found {shlex.join(options.flags) or 'no flag'}, as --without, needs flags in which the runs "
            'differ. Give some, as in --with "--ciera"'
        )
    if os.environ.get(DISABLE) == "1":
        parser.error(f"{DISABLE}: found 1, needs 0 or nothing: both runs would be stock. Unset it")
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not options.command:
        parser.error("no command to run: give it after --")
    if shutil.which(options.command[0]) is None:
        parser.error(
            f"found {options.command[0]}, needs a program that can be run, such as torchrun. Correct it after --"
        )
    if options.iterations is not None:
        options.command += ["--train-iters", str(options.iterations)]
    return options


def _words(text: str) -> list[str]:
    """argparse type: flags in one string."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text}: {error}. Close it") from None


def _with_values_joined(argv: list[str]) -> list[str]:
    """`--with "--ciera"` as `--with=--ciera`: argparse takes a value of one word that starts with - for a flag."""
    joined, words = [], iter(argv)
    for word in words:
        value = next(words, None) if word in ("--with", "--without") else None
        if "--" in (word, value):  # what follows is the command's own
            return [*joined, *([word, value] if value else [word]), *words]
        joined.append(word if value is None else f"{word}={value}")
    return joined


def _compare(options, folder: Path) -> int:
    # The flags under test first: a mistake in them shows before anything else has been trained.
    runs = {"with": options.flags, "without": options.without}
    if options.stock_twice:
        runs["again"] = options.without
    try:
        for name, flags in runs.items():
            log = folder / name / "log.txt"
            code = observe_run([*options.command, *flags], folder / name, log)
            if code:
                print(_failure(name, code, log, options), file=sys.stderr)
                return 2
            _check_trained(name, log, options)
            observe.read_iterations(folder / name)  # nothing to compare: known before the next run
        results = {"comparison": compare(folder / "without", folder / "with").as_dict()}
        if options.stock_twice:
            results["stock_twice"] = compare(folder / "again", folder / "without").as_dict()
        of_flags = effects(folder / "without", folder / "with", options.flags)
    except (ValueError, OSError) as error:
        print(f"error: the runs cannot be compared: {error}", file=sys.stderr)
        return 2
    done, idle = of_flags["effect"], of_flags["without_effect"]
    equal = all(found["equal"] for found in results.values())
    if options.json:
        flags = {"with": shlex.join(options.flags), "command": options.command}
        print(json.dumps({**flags, **of_flags, **results}))
    elif not (equal and idle):
        for name, found in results.items():
            print(f"{name}: {_sentence(found)}")
        for flag, what in done.items():
            print(f"  {flag}: {what}")
        print(_report_hint(options.output))
    if not equal:
        return 1
    if not idle:
        return 0
    print(
        f"error: equal over {results['comparison']['iterations']} iterations, which proves nothing:",
        file=sys.stderr,
    )
    for flag, why in idle.items():
        print(f"  {flag} had no effect: {why}", file=sys.stderr)
    return 2


def _failure(name: str, code: int, log: Path, options) -> str:
    """The end of what a run printed, and the way out if Megatron refused the checkpoint's schedule."""
    said = log.read_text(errors="replace")
    kept = f"; all it printed: {log}" if options.output else ""
    told = f"{said[-4000:]}\nthe run '{name}' ended with exit code {code}{kept}"
    found = _OTHER_SCHEDULE.search(said)
    if found is None:
        return told
    here, stored, what = found.groups()
    source = ""
    if what.startswith("total number"):
        given = f" (--iterations {options.iterations})" if options.iterations else ""
        source = f"; it counts samples and follows from --train-iters{given}"
    return (
        f"{told}\n--load: found {what} {stored} in the checkpoint and {here} in this run, needs the same{source}. "
        f"Add {_KEEP_SCHEDULE} to the command to go on with the checkpoint's schedule of learning rate and weight "
        "decay (--override-opt_param-scheduler: with this run's, which may end at the lowest rate)"
    )


def _check_trained(name: str, log: Path, options) -> None:
    if untrained := re.search(rf"{observe.UNTRAINED} .+", log.read_text(errors="replace")):
        given = " (--iterations sets it)" if options.iterations else ""
        saved = ", or leave --save out: the run before saved its end into the folder of --load"
        raise ValueError(f"the run '{name}': {untrained[0]}{given}{saved if name != 'with' else ''}")


def _report_hint(output: Path | None) -> str:
    """How to see both runs on a page."""
    if output is None:
        return f"logs were not kept; --output FOLDER keeps them, for a page of both by {_report_program()}"
    run, baseline, page = (shlex.quote(str(output / name)) for name in ("with", "without", "report.html"))
    return f"both runs on a page: {_report_program()} {run} --baseline {baseline} --output {page}"


def _report_program() -> str:
    """The report's command, beside this one: the script in a clone, the command of an installed package."""
    typed = Path(sys.argv[0])
    if typed.name not in _REPORT:
        return "ciera-report-run"
    report = typed.with_name(_REPORT[typed.name])
    if typed.suffix == ".py":
        return shlex.join([sys.executable, str(report)])
    return report.name if shutil.which(report.name) == str(report) else shlex.quote(str(report))


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
