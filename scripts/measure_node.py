"""Every feature on one host of GPUs at once: bits, the parts alone, whole training steps; each beside its prediction.

    scripts/measure_node.py --gpus 8 --weights STEP1.npz STEP2.npz --routing top2.npz top6.npz --output FOLDER

predict:  the simulator's step times of the runs of `steps`. Kept once written, so that they are from before the runs.
parity:   training of a small model, bit for bit: DP = N, EP = N, TP = EP = N, EP = N/2 × expert DP 2.
gather:   scripts/bench_param_gather.py on each link.
dispatch: scripts/bench_dispatch.py on each link, on recorded routing, contiguous and correlated.
shuffle:  scripts/bench_shuffle.py on each link, TP = EP = N.
steps:    iteration times of the models of --configs on each link, stock and with each feature.
A table comes last. FOLDER/report.json has everything, FOLDER/report.md the table, FOLDER/runs/*.log what was printed.
Stages that are in report.json are kept when others are run later. Exit code 1 if a parity line or a run fails.
"""

import _path  # noqa: F401, I001
import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from _node_parity import CIERA, PLACED, SHUFFLED, parity
from _node_table import table
from _runs import LINKS, SCRIPTS, launch, result_of, slug, train
from megatron_ciera.cluster import Link
from megatron_ciera.errors import output_folder
from megatron_ciera.simulator.features import parse_features, rates_at
from megatron_ciera.simulator.hardware import hardware
from megatron_ciera.simulator.job import job_from_config
from megatron_ciera.simulator.project import Assumptions, project
from megatron_ciera.transformer_engine import LOCAL_LAYERS
from megatron_ciera.yaml_config import load_config

CONFIGS = SCRIPTS.parent / "configs"
DEFAULT_CONFIGS = ("coupling_top6_tp1_ep8_h200_1n", "coupling_top6_tp8_ep8_h200_1n", "olmoe_1b_7b_h200_1n")
# What a link of LINKS carries, GB/s and µs, measured between two H200s; --link-speeds replaces it.
SPEEDS = {"nvlink": (272.0, 3.0), "shm": (25.0, 20.0), "socket": (7.5, 60.0)}

# Runs of `steps`: the simulator's words, flags.
STEPS = {
    "stock": ("stock", []),
    "ciera": ("ciera", CIERA),
    "dedup": ("dedup", ["--dedup-dispatch"]),
    "placement": ("placement", PLACED),
    "placement + ciera": ("ciera+placement", [*PLACED, *CIERA]),
    "placement + shuffle": ("placement+shuffle", SHUFFLED),
}


def predict(options) -> dict:
    """{config: {link: {run: seconds}}} of the simulator, with each link between the GPUs."""
    found: dict = {}
    for path in options.configs:
        config = chosen(path, options)
        job, cluster = job_from_config(config), config.cluster
        if job.world != options.gpus:
            raise SystemExit(
                f"--configs {path}: its cluster has {job.world} GPUs, found --gpus {options.gpus}; needs the same. "
                "Give a config of that size."
            )
        for link in options.links:
            between = Link(*options.speeds[link])
            machine = replace(cluster, intra_node=between, inter_node=between)
            for name, (words, _) in variants(job):
                assumed = Assumptions(rates_at(job.learning_rate))
                made = project(job, machine, hardware(machine), parse_features(words), assumed, job.world)
                found.setdefault(path.stem, {}).setdefault(link, {})[name] = made.seconds
    return found


def chosen(path: Path, options):
    """The config with what --set puts in place of its flags."""
    config = load_config(str(path))
    return replace(config, flags=config.flags | {f"--{name}": [value] for name, value in options.set})


def variants(job):
    """The runs of STEPS that a config's layout allows."""
    for name, (words, flags) in STEPS.items():
        if not (job.expert == 1 and ("dedup" in words or "placement" in words)) and not (
            "shuffle" in words and job.tensor != job.expert
        ):
            yield name, (words, flags)


def gather(options, folder: Path) -> dict:
    """{link: result}"""
    found = {}
    for link in options.links:
        words = ["-m", "megatron_ciera.param_gather.bench", "--num-values", str(options.num_values)]
        words += ["--weights", *map(str, options.weights)]
        code, printed = launch(words, options.gpus, folder / f"gather_{link}.log", LINKS[link], options.limit)
        result = result_of(printed)
        found[link] = failed(f"exit {code}: {printed}") if result is None else result
        print(f"gather {link}: {'FAILED' if result is None else 'done'}", flush=True)
    return found


def dispatch(options, folder: Path) -> dict:
    """{trace: {link: result}}"""
    return on_traces("bench_dispatch.py", [], options, folder)


def shuffle(options, folder: Path) -> dict:
    """{trace: {link: result}}; parity on the first link alone."""
    return on_traces("bench_shuffle.py", ["--planner-ranks"], options, folder)


def on_traces(script: str, words: list[str], options, folder: Path) -> dict:
    found: dict = {}
    for trace in options.routing:
        for link in options.links:
            place = folder / slug(f"{script} {trace.stem} {link}")
            output = place.with_suffix(".json")
            command = [str(SCRIPTS / script), str(trace), "--label", link, "--output", str(output), *words]
            code, printed = launch(
                command, options.gpus, place.with_suffix(".log"), LINKS[link], options.limit
            )
            result = json.loads(output.read_text()) if code == 0 else failed(f"exit {code}: {printed}")
            found.setdefault(trace.stem, {})[link] = result
            print(f"{script} {trace.stem} {link}: {'done' if code == 0 else 'FAILED'}", flush=True)
    return found


def steps(options, folder: Path) -> dict:
    """{config: {link: {run: measured}}}; a run's seconds are the median of the second half of its iterations."""
    found: dict = {}
    for path in options.configs:
        job = job_from_config(chosen(path, options))
        common = ["--config", str(path), "--mock-data", "--num-workers", "0", "--log-interval", "1"]
        common += ["--train-iters", str(options.iterations), *options.implementation]
        common += [word for name, value in options.set for word in (f"--{name}", value)]
        for link in options.links:
            for name, (_, flags) in variants(job):
                place = folder / slug(f"steps {path.stem} {link} {name}")
                environment = LINKS[link] | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
                run = train(place, options.gpus, [*common, *flags], environment, options.limit)
                half = run["seconds"][options.iterations // 2 :]
                run |= {"seconds": statistics.median(half) if half else None, "all": half}
                found.setdefault(path.stem, {}).setdefault(link, {})[name] = run
                print(f"steps {path.stem} {link} {name}: exit {run['exit']}, {run['seconds']} s", flush=True)
    return found


def failed(text: str) -> dict:
    return {"failed": text[-2000:]}


STAGES = {"parity": parity, "gather": gather, "dispatch": dispatch, "shuffle": shuffle, "steps": steps}


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    runs = options.output / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    file = options.output / "report.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    told = {"gpus": options.gpus, "set": options.set, "speeds": options.speeds}
    told = json.loads(json.dumps(told))
    if report.setdefault("told", told) != told:
        raise SystemExit(
            f"{file}: its predictions are for {report['told']}, found {told}; needs the same --gpus, --set and "
            "--link-speeds. Name another --output"
        )
    report.setdefault("predict", {})
    for config, links in predict(options).items():
        known = report["predict"].setdefault(config, {})
        known |= {link: said for link, said in links.items() if link not in known}
    file.write_text(json.dumps(report, indent=1))
    for stage in options.stages:
        begin = time.time()
        report[stage] = STAGES[stage](options, runs)
        print(f"{stage}: {time.time() - begin:.0f} s", flush=True)
        file.write_text(json.dumps(report, indent=1))
    text = "\n".join(table(report)) + "\n"
    (options.output / "report.md").write_text(text)
    print(text)
    return 1 if "FAILED" in text else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--gpus", type=int, default=8, help="processes, a GPU each")
    option("--output", type=output_folder, required=True)
    option("--stages", nargs="*", choices=STAGES, default=list(STAGES), help="none: predictions only")
    option("--links", nargs="+", choices=LINKS, default=list(LINKS))
    option(
        "--link-speeds",
        nargs="+",
        default=[],
        metavar="LINK=GB/S,MICROSECONDS",
        help="what the predictions count with, as scripts/measure_links.py finds it",
    )
    option("--configs", nargs="+", type=Path, default=[CONFIGS / f"{name}.yaml" for name in DEFAULT_CONFIGS])
    option(
        "--set", nargs="+", default=[], metavar="FLAG=VALUE", help="Megatron flags in place of the configs'"
    )
    option("--transformer-engine", action="store_true", help="for `steps`; default: Megatron's local layers")
    option("--weights", nargs="+", type=Path, default=[], help="consecutive snapshots, for `gather`")
    option("--num-values", type=int, default=1 << 28)
    option(
        "--routing", nargs="+", type=Path, default=[], help="recorded routing, for `dispatch` and `shuffle`"
    )
    option("--parity-iterations", type=int, default=40)
    option("--side-by-side", type=int, default=2, help="parity runs at a time")
    option("--iterations", type=int, default=14, help="of a run of `steps`")
    option("--limit", type=float, default=240, help="seconds that one run may take")
    options = parser.parse_args(argv)
    if options.gpus < 2:
        parser.error(f"--gpus: found {options.gpus}, needs 2 or more")
    if "gather" in options.stages and len(options.weights) < 2:
        parser.error("--weights: needs two consecutive snapshots or more, or leave `gather` out of --stages")
    if {"dispatch", "shuffle"} & set(options.stages) and not options.routing:
        parser.error("--routing: needs a trace, or leave `dispatch` and `shuffle` out of --stages")
    options.set = [tuple(pair(parser, "--set", each)) for each in options.set]
    options.speeds = dict(SPEEDS)
    for each in options.link_speeds:
        link, speed = pair(parser, "--link-speeds", each)
        try:
            bandwidth, latency = map(float, speed.split(","))
        except ValueError:
            parser.error(f"--link-speeds: found {each}, needs {link}=GB/S,MICROSECONDS")
        options.speeds[link] = (bandwidth, latency)
    options.implementation = [] if options.transformer_engine else LOCAL_LAYERS
    return options


def pair(parser, flag: str, text: str) -> list[str]:
    if "=" not in text:
        parser.error(f"{flag}: found {text}, needs NAME=VALUE")
    return text.split("=", 1)


if __name__ == "__main__":
    sys.exit(main())
