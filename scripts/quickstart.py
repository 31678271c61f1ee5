"""The first run: trains a small MoE GPT on real text and shows what our flags change and what they do not.

Writes report.json and report.html and ends with a table. Exit code 1 if something that should hold does not.
"""

import _path  # noqa: F401, I001
import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from megatron_ciera import cpu
from megatron_ciera.errors import output_folder
from megatron_ciera.quickstart import page, steps, summary
from megatron_ciera.quickstart.runs import Plan

# What a quickstart leaves in its folder; a folder with anything else in it is somebody's.
OURS = frozenset(
    "dataset data_cache runs checkpoint routing_trace placement.json placement.npz placement.html "
    "report.json report.html".split()
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output",
        type=output_folder,
        default=Path("out/quickstart"),
        help="folder, new or of an earlier quickstart, which is removed",
    )
    parser.add_argument("--short", action="store_true", help="fewer iterations, for a check")
    options = parser.parse_args(argv)
    if options.output.exists():
        foreign = sorted({path.name for path in options.output.iterdir()} - OURS)
        if foreign:
            parser.error(
                f"--output {options.output}: found {foreign[0]}, which no quickstart wrote; wanted a folder that "
                "may be removed: name a new one"
            )

    begin = time.perf_counter()
    shutil.rmtree(options.output, ignore_errors=True)
    plan = Plan(options.output.resolve(), *((32, 8) if options.short else (56, 20)))
    plan.folder.mkdir(parents=True)
    if cpu.is_needed():
        cpu.install()  # for the dataset writer, which imports Megatron in this process
    outcome = steps.run(plan)
    (plan.folder / "report.json").write_text(json.dumps(outcome.report, indent=2) + "\n")
    page.write(plan, outcome, plan.folder / "report.html")

    print(page.table(outcome.report))
    print(
        f"\n{time.perf_counter() - begin:.0f} s; {options.output}/report.json, {options.output}/report.html"
    )
    wrong = summary.problems(outcome.report)
    for text in wrong:
        print(f"does not hold: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
