"""The command line of scripts/simulate.py."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_ciera.errors import ConfigurationError, refuse
from megatron_ciera.simulator import report
from megatron_ciera.simulator.features import (
    ChangeRates,
    Features,
    parse_features,
    rates_at,
    rates_from_stability,
)
from megatron_ciera.simulator.hardware import Hardware, hardware
from megatron_ciera.simulator.job import Job, job_from_config
from megatron_ciera.simulator.project import Assumptions, Projection, default_features, default_sizes, project
from megatron_ciera.simulator.replay import RECORDED, Target, replay, replay_as_recorded
from megatron_ciera.simulator.trace import read_trace
from megatron_ciera.yaml_config import load_config
from placement.cli_common import output_file, plot_file


def parser() -> argparse.ArgumentParser:
    """All options; see docs/simulator.md."""
    made = argparse.ArgumentParser(
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
    option(
        "--block-size",
        type=int,
        help="values per exponent block; default: the largest of --stability, else 512",
    )
    option("--block-change-rate", metavar="X", help="one number, or dense=X,expert=Y, for exponent-reuse")
    option(
        "--rows-removed", type=float, help="share of rows that placement removes; see evaluate_placement.py"
    )
    option("--rank-load", type=float, default=1.0, help="busiest rank over mean")
    option("--layers", type=int, help="simulate this many layers of the model")
    option("--seq-length", type=int, help="simulate this sequence length")
    option(
        "--gather-ratio", type=float, metavar="X", help="bytes sent over raw bytes, as a run's ciera/ratio"
    )
    option("--encode-gb-s", type=float, help="speed of the codec, raw bytes a second; see bench_codec.py")
    option("--decode-gb-s", type=float, help="likewise")
    option("--efficiency", type=float, default=0.45, help="share of the bf16 peak that matrix products reach")
    option("--plot", type=plot_file, metavar="FILE", help="stacked bars of the split of time")
    option("--timeline", type=output_file, metavar="FILE", help="Chrome trace of the last projection")
    option("--json", action="store_true", help="one JSON object on standard output")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; 0, or 2 after a message."""
    given = parser().parse_args(argv)
    try:
        _run(given)
    except ConfigurationError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(given: argparse.Namespace) -> None:
    config = load_config(given.config)
    job = _resized(job_from_config(config, from_trace=given.trace is not None), given)
    if given.rank_load < 1:
        raise refuse("--rank-load", given.rank_load, "1 or more: busiest rank over mean", "Correct it.")
    gpu = _with_codec(hardware(config.cluster, given.efficiency), given)
    rates = _rates(given, job)
    assumed = Assumptions(rates, given.rows_removed, given.rank_load)
    if given.trace:
        projections, source = _replayed(given, config.cluster, gpu, assumed)
    else:
        sizes = _sizes(given) or default_sizes(job)
        names = given.features.split(",") if given.features else default_features(job)
        variants = [parse_features(name) for name in names]
        _check_ratio(given, variants)
        projections = [
            project(job, config.cluster, gpu, variant, assumed, size)
            for size in sizes
            for variant in variants
        ]
        source = {"source": "analytic"}
    facts = {
        "config": given.config,
        **source,
        "change_rates": rates.source,
        "tokens_per_gpu": None if given.trace else job.tokens_per_step // job.world,
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


def _replayed(given, cluster, gpu, assumed: Assumptions) -> tuple[list[Projection], dict]:
    """The trace on the config's cluster; what the config's `megatron:` says does not count."""
    for flag, is_default in (
        ("--layers", given.layers is None),
        ("--seq-length", given.seq_length is None),
        ("--rank-load", given.rank_load == 1.0),
    ):
        if not is_default:
            raise refuse(
                flag, "--trace beside it", "a simulated config", "Leave one out: a trace has it as recorded."
            )
    trace = read_trace(given.trace)
    world = trace.header["world"]
    sizes = _sizes(given) or [world]
    if given.features:
        names = given.features.split(",")
        variants = [RECORDED if name in ("recorded", "stock") else parse_features(name) for name in names]
    else:
        variants = [RECORDED]
        if trace.gathers_bf16 and "ciera" not in trace.header["features"]:
            variants.append(parse_features("ciera"))
        experts = trace.header["settings"]["expert_model_parallel_size"] > 1
        if experts and "dedup" not in trace.header["features"]:
            variants += [parse_features("dedup"), parse_features("placement")]
    _check_ratio(given, variants)
    projections = []
    for size in sizes:
        near = replace(cluster, gpus_per_node=min(size, cluster.gpus_per_node))
        for variant in variants:
            target = Target(near, gpu, variant, assumed.rates, size, assumed.rows_removed)
            projections.append(replay(trace, target))
    recorded = trace.typical()
    return projections, {
        "source": trace.path,
        "clock": trace.header["clock"],
        "recorded_features": trace.header["features"],
        "recorded_iteration": recorded.number,
        "recorded_seconds": recorded.seconds,
        "replayed_as_recorded_seconds": replay_as_recorded(trace),
    }


def _sizes(given: argparse.Namespace) -> list[int]:
    """The numbers of --gpus; empty without it."""
    words = given.gpus.split(",") if given.gpus else []
    for word in words:
        if not word.strip().isdigit():
            raise refuse("--gpus", word, "whole numbers with commas between them", "Such as --gpus 8,16.")
    return [int(word) for word in words]


def _resized(job: Job, given: argparse.Namespace) -> Job:
    if given.layers is not None:
        if not 0 < given.layers <= job.num_layers or given.layers % job.pipeline:
            raise refuse(
                "--layers", given.layers, f"1 to {job.num_layers}, a multiple of {job.pipeline}", "Change it."
            )
        job = replace(job, num_layers=given.layers, is_moe=job.is_moe[-given.layers :])
    if given.seq_length is not None:
        job = replace(job, sequence=given.seq_length)
    return job


def _with_codec(gpu: Hardware, given: argparse.Namespace) -> Hardware:
    """The codec as fast as it was measured, where that is given; two bytes a value."""
    for flag in ("gather_ratio", "encode_gb_s", "decode_gb_s", "efficiency"):
        value = getattr(given, flag)
        if value is not None and not value > 0:
            raise refuse("--" + flag.replace("_", "-"), value, "a positive number", "Correct it.")
    return gpu.with_codec(given.encode_gb_s, given.decode_gb_s)


def _rates(given: argparse.Namespace, job: Job) -> ChangeRates:
    if given.block_size is not None and given.block_size < 1:
        raise refuse("--block-size", given.block_size, "1 or more", "Correct it.")
    rates = rates_at(job.learning_rate, given.block_size or 512)
    if given.stability:
        try:
            measured = json.loads(Path(given.stability).read_text())
            rates = rates_from_stability(measured, given.stability, given.block_size)
        except ConfigurationError:
            raise
        except (OSError, ValueError, LookupError) as error:
            raise refuse(
                "--stability",
                f"{given.stability} ({type(error).__name__}: {error})",
                "what measure_stability.py --json printed",
                "Write its output to a file.",
            ) from error
    if given.block_change_rate:
        blocks = dict(rates.block_change_rate)
        for part in given.block_change_rate.split(","):
            name, equals, value = part.rpartition("=")
            if equals and name not in blocks:
                raise refuse("--block-change-rate", name, " or ".join(blocks), "Correct it.")
            share = _share("--block-change-rate", value)
            blocks.update({name: share} if equals else dict.fromkeys(blocks, share))
        rates = replace(
            rates, block_change_rate=blocks, source=rates.source + "; block change rates as given"
        )
    if given.gather_ratio is not None:
        rates = rates.with_ratio(given.gather_ratio)
    return rates


def _check_ratio(given: argparse.Namespace, variants: Sequence[Features]) -> None:
    codecs = {variant.codec for variant in variants} - {None}
    if given.gather_ratio is not None and len(codecs) > 1:
        raise refuse(
            "--gather-ratio",
            f"{given.gather_ratio} for variants with {' and '.join(sorted(codecs))}",
            "variants of the one codec that reached it",
            "Simulate the others apart.",
        )


def _share(flag: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise refuse(flag, text, "a share from 0 to 1", "45 % is 0.45.")
    return share


def _notes(projections, facts: dict) -> str:
    lines = [f"change rates: {facts['change_rates']}"]
    rows = {p.features: p.rows_source for p in projections if p.rows_source is not None}
    lines += [f"rows of {name}: {source}" for name, source in rows.items()]
    if "recorded_seconds" in facts:
        times = (
            "host times of gloo, which say nothing of a GPU" if facts["clock"] == "host" else "CUDA events"
        )
        lines.append(
            f"trace: {facts['source']}, iteration {facts['recorded_iteration']}, recorded "
            f"{1e3 * facts['recorded_seconds']:.1f} ms, replayed as recorded "
            f"{1e3 * facts['replayed_as_recorded_seconds']:.1f} ms ({times})"
        )
    else:
        memory = max(p.memory for p in projections)
        lines.append(f"tokens: {facts['tokens_per_gpu']:,} a GPU and step, at every size")
        lines.append(f"memory: about {memory / 1e9:.0f} GB a GPU of {facts['memory_limit_gb']:.0f} GB")
        if memory > 1e9 * facts["memory_limit_gb"]:
            lines.append("memory: this does not fit; read the times as if it did")
    lines.append(
        "percentages: what a GPU computes or waits for. Not validated on hardware; see docs/simulator.md"
    )
    return "\n".join(lines)
