"""Checks the simulator against training on the GPUs of this host, on links that NCCL is made to take.

    scripts/validate_simulator.py --output FOLDER [--config FILE] [--links nvlink shm socket] [--iterations 16]

For each link: its speed; a recorded stock run and a --ciera run, data parallel; a recorded stock run and one
with --dedup-dispatch, expert parallel. Then every stock trace is played for every run of its kind. Prints a table;
FOLDER/validation.json has the numbers, FOLDER/*.log what was printed, FOLDER/trace_* the traces.
"""

import _path  # noqa: F401, I001
import argparse
import json
from dataclasses import asdict
from pathlib import Path

from _runs import LINKS, TRAIN, iteration_seconds, launch
from megatron_ciera import observe
from megatron_ciera.errors import output_folder
from megatron_ciera.simulator.trace import read_trace
from megatron_ciera.simulator.validation import Measured, on_link, predict, table
from megatron_ciera.yaml_config import load_config

ROOT = Path(__file__).resolve().parents[1]
EXPERT_PARALLEL = ["--expert-model-parallel-size", "2"]
RUNS = {
    ("data", "stock"): [],
    ("data", "ciera"): ["--ciera", "--ciera-warmup-iters", "4"],
    ("expert", "stock"): EXPERT_PARALLEL,
    ("expert", "dedup"): [*EXPERT_PARALLEL, "--dedup-dispatch"],
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=output_folder, required=True)
    parser.add_argument("--config", default=str(ROOT / "configs" / "moe_8e_h200_2gpus.yaml"))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--codec-gb-s", type=float, nargs=2, metavar=("ENCODE", "DECODE"))
    parser.add_argument("--link-bytes", type=int, default=1 << 28)
    options = parser.parse_args(argv)
    if options.iterations < 8:
        parser.error(f"--iterations: found {options.iterations}, needs 8 or more; the first half warms up")
    options.output.mkdir(parents=True, exist_ok=True)
    links, runs = {}, {}
    for link in options.links:
        links[link] = _measure_link(link, options)
        for kind, variant in RUNS:
            runs[kind, variant, link] = _train(kind, variant, link, options)
            print(f"{link} {kind} {variant}: {1e3 * runs[kind, variant, link].middle:.1f} ms", flush=True)
    predictions = _predict(links, runs, options)
    (options.output / "validation.json").write_text(
        json.dumps(
            {
                "links": links,
                "predictions": [asdict(each) | {"error": each.error} for each in predictions],
            },
            indent=1,
        )
    )
    print(json.dumps(links))
    print(table(predictions))
    return 0


def _predict(links: dict, runs: dict, options) -> list:
    cluster = load_config(options.config).cluster
    traces = {
        (kind, link): read_trace(str(options.output / f"trace_{link}_{kind}"))
        for kind, variant, link in runs
        if variant == "stock"
    }
    found = []
    for (kind, _variant, link), run in runs.items():
        target = on_link(cluster, links[link])
        for recorded_on in options.links:
            recorded = runs[kind, "stock", recorded_on]
            found.append(predict(run, recorded, traces[kind, recorded_on], target, options.codec_gb_s))
    return found


def _torchrun(words: list[str], link: str, log: Path, **variables: str) -> str:
    """What two processes printed.

    Raises:
        SystemExit: they failed; the end of what they printed is shown.
    """
    code, printed = launch(words, 2, log, LINKS[link] | variables)
    if code:
        raise SystemExit(f"{' '.join(words)}: exit code {code}\n{printed[-3000:]}")
    return printed


def _measure_link(link: str, options) -> dict:
    words = [str(ROOT / "scripts" / "measure_links.py"), "--json", "--num-bytes", str(options.link_bytes)]
    printed = _torchrun(words, link, options.output / f"link_{link}.log")
    return json.loads(printed.splitlines()[-1])["intra_node"]


def _train(kind: str, variant: str, link: str, options) -> Measured:
    folder = options.output / f"run_{link}_{kind}_{variant}"
    words = [TRAIN, "--config", options.config, "--mock-data"]
    words += ["--train-iters", str(options.iterations), "--num-workers", "0", *RUNS[kind, variant]]
    if variant == "stock":
        words += ["--ciera-record", str(options.output / f"trace_{link}_{kind}")]
    printed = _torchrun(words, link, folder.with_suffix(".log"), **{observe.VARIABLE: str(folder)})
    metrics = observe.read_iterations(folder)[-1]["metrics"]
    removed = metrics.get("moe/rows_removed") if variant == "dedup" else None
    return Measured(
        link,
        variant,
        tuple(iteration_seconds(printed)[options.iterations // 2 :]),
        metrics.get("ciera/ratio") if variant == "ciera" else None,
        removed,
    )


if __name__ == "__main__":
    raise SystemExit(main())
