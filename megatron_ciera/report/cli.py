"""Writes report.html from a finished run's logs.

    scripts/report_run.py LOG… [--baseline LOG…] [--output report.html] [--json]

LOG: what a run leaves behind, one or several of: its console log, a folder or file of TensorBoard events, the folder
that MEGATRON_CIERA_OBSERVE named, or a folder that holds them. See docs/report.md. Exit code 2: a log that cannot be
used; nothing is written then.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ciera.errors import ConfigurationError
from megatron_ciera.report import sections, summary
from megatron_ciera.report.run_log import read_run
from placement.cli_common import plot_file
from placement.file import write_atomically


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="the run: files or folders")
    made.add_argument(
        "--baseline", nargs="+", type=Path, metavar="LOG", help="the run to compare with, likewise"
    )
    made.add_argument("--output", type=plot_file, default="report.html", metavar="FILE", help="the page")
    made.add_argument("--title", default=None, help="the page's title")
    made.add_argument(
        "--unfinished", action="store_true", help="take logs that end before their last iteration"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, or 2 after a message."""
    options = parser().parse_args(argv)
    try:
        found = _write(options)
    except (ConfigurationError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(found))
        return 0
    rows = summary.rows(found)
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for what, value, note in rows:
        print(f"{what:{widths[0]}}  {value:>{widths[1]}}  {note}".rstrip())
    print(f"\n{options.output}")
    return 0


def _write(options: argparse.Namespace) -> dict:
    run = read_run(options.logs, options.unfinished)
    baseline = read_run(options.baseline, options.unfinished) if options.baseline else None
    if baseline is not None:
        same = [f"{a} and {b}" for a in run.files for b in baseline.files if a.samefile(b)]
        if same:
            raise ConfigurationError(
                f"--baseline: found the run itself ({same[0]} are one file), needs another run. Name the log of the "
                "run to compare with, or leave it out"
            )
    found = summary.summarise(run, baseline)
    title = options.title or f"Training run {options.logs[0]}"
    write_atomically(options.output, sections.document(run, baseline, found, title))
    return found


if __name__ == "__main__":
    sys.exit(main())
