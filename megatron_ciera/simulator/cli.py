"""The command line of scripts/simulate.py."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ciera.errors import ConfigurationError, refuse
from megatron_ciera.simulator import report
from megatron_ciera.simulator.features import ChangeRates, parse_features, rates_at, rates_from_stability
from megatron_ciera.simulator.hardware import hardware
from megatron_ciera.simulator.job import Job, job_from_config
from megatron_ciera.simulator.project import Assumptions, default_features, default_sizes, project
from megatron_ciera.yaml_config import load_config


def parser() -> argparse.ArgumentParser:
    """All options; see docs/simulator.md."""
    made = argparse.ArgumentParser(
        prog="simulate.py",
        description="Projects step times of a config, or of a recorded trace, on a cluster.",
    )
    option = made.add_argument
    option("--config", required=True, help="YAML with `megatron:` and `cluster:`")
    option("--trace", help="recorded with --ciera-record: a folder, or one rank's file")
    option("--gpus", help="comma-separated; default: the config's own size, doubled up to 1024")
    option(
        "--features",
        help="comma-separated variants, each `stock` or words joined by +; see docs/simulator.md",
    )
    option(
        "--stability",
        metavar="FILE",
        help="JSON of measure_stability.py: change rates instead of built-in ones",
    )
    option("--block-size", type=int, default=512, help="values per exponent block")
    option("--block-change-rate", metavar="X", help="one number, or dense=X,expert=Y, for exponent-reuse")
    option(
        "--rows-removed", type=float, help="share of rows that placement removes; see evaluate_placement.py"
    )
    option("--rank-load", type=float, default=1.0, help="busiest rank over mean")
    option("--layers", type=int, help="simulate this many layers of the model")
    option("--seq-length", type=int, help="simulate this sequence length")
    option("--efficiency", type=float, default=0.45, help="share of the bf16 peak that matrix products reach")
    option("--plot", metavar="FILE", help="stacked bars of the split of time")
    option("--timeline", metavar="FILE", help="Chrome trace of the last projection")
    option("--json", action="store_true", help="one JSON object on standard output")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, or 2 after a message."""
    given = parser().parse_args(argv)
    try:
        _run(given)
    except ConfigurationError as error:
        print(f"simulate.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace) -> None:
    config = load_config(given.config)
    job = _resized(job_from_config(config), given)
    gpu = hardware(config.cluster, given.efficiency)
    rates = _rates(given, job)
    assumed = Assumptions(rates, given.rows_removed, given.rank_load)
    sizes = [int(size) for size in given.gpus.split(",")] if given.gpus else default_sizes(job)
    names = given.features.split(",") if given.features else default_features(job)
    variants = [parse_features(name) for name in names]
    projections = [
        project(job, config.cluster, gpu, variant, assumed, size) for size in sizes for variant in variants
    ]
    facts = {
        "config": given.config,
        "source": "analytic",
        "change_rates": rates.source,
        "tokens_per_gpu": job.tokens_per_step // job.world,
        "memory_limit_gb": gpu.capacity / 1e9,
    }
    if given.plot:
        report.plot(projections, given.plot, Path(given.config).stem)
    if given.timeline:
        report.write_timeline(projections[-1], given.timeline)
    if given.json:
        print(json.dumps(report.document(projections, facts)))
        return
    print(report.table(projections))
    print(_notes(projections, facts))


def _resized(job: Job, given: argparse.Namespace) -> Job:
    from dataclasses import replace

    if given.layers is not None:
        if not 0 < given.layers <= job.num_layers or given.layers % job.pipeline:
            raise refuse(
                "--layers", given.layers, f"1 to {job.num_layers}, a multiple of {job.pipeline}", "Change it."
            )
        job = replace(job, num_layers=given.layers, is_moe=job.is_moe[-given.layers :])
    if given.seq_length is not None:
        job = replace(job, sequence=given.seq_length)
    return job


def _rates(given: argparse.Namespace, job: Job) -> ChangeRates:
    from dataclasses import replace

    rates = rates_at(job.learning_rate, given.block_size)
    if given.stability:
        rates = rates_from_stability(json.loads(Path(given.stability).read_text()), given.stability)
    if given.block_change_rate:
        blocks = dict(rates.block_change_rate)
        for part in given.block_change_rate.split(","):
            name, equals, value = part.rpartition("=")
            if equals and name not in blocks:
                raise refuse("--block-change-rate", name, " or ".join(blocks), "Correct it.")
            blocks.update({name: float(value)} if equals else dict.fromkeys(blocks, float(value)))
        rates = replace(
            rates, block_change_rate=blocks, source=rates.source + "; block change rates as given"
        )
    return rates


def _notes(projections, facts: dict) -> str:
    memory = max(p.memory for p in projections if p.memory is not None)
    lines = [
        f"change rates: {facts['change_rates']}",
        f"tokens: {facts['tokens_per_gpu']:,} a GPU and step, at every size",
        f"memory: about {memory / 1e9:.0f} GB a GPU of {facts['memory_limit_gb']:.0f} GB",
    ]
    if memory > 1e9 * facts["memory_limit_gb"]:
        lines.append("memory: this does not fit; read the times as if it did")
    lines.append(
        "percentages: what a GPU computes or waits for. Not validated on hardware; see docs/simulator.md"
    )
    return "\n".join(lines)
