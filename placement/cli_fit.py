"""Command line: fit a placement from a routing trace (scripts/fit_placement.py)."""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

from placement import cli_common
from placement.cli_common import of_ranks, output_file, percent, plot_file, positive_int, say
from placement.fit import USUAL_TOKENS, NoGainError, check_shape, fit_layers, infer_num_experts
from placement.prediction import fit_tables
from placement.report import write_report
from placement.table_file import is_tables, save_tables
from placement.trace import read_tokens
from placement.writers import FORMATS, write_placement

# docs/results/placement.md measures fits from this many tokens on.
_FEW_TOKENS = 1024


def _tolerance(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} found, wanted a number from 0, or inf for no limit")
    return value


def _tables_path(output: str) -> Path:
    return Path(output).with_suffix(".npz")


def _placement_file(text: str) -> str:
    if Path(text) == _tables_path(text):
        raise argparse.ArgumentTypeError(
            f"{text}: .npz is the suffix of the prediction tables beside it; name the placement .json"
        )
    output_file(text)
    output_file(str(_tables_path(text)))
    return text


def _check_tables_path(output: str) -> None:
    """Raises ValueError when the tables of `output` would take the place of something else."""
    tables, other = _tables_path(output), Path(output).with_suffix(".json")
    if Path(output) != other and other.exists():
        why = f"the place of those of {other}, which lies there"
    elif tables.exists() and not is_tables(tables):
        why = "which holds something else"
    else:
        return
    raise ValueError(
        f"--output {output}: its prediction tables would be written to {tables}, {why}; name a .json of another name"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Fits a correlated expert placement from the experts that tokens select."
    )
    cli_common.add_trace_arguments(parser)
    parser.add_argument("--expert-parallel-size", type=positive_int, required=True, metavar="EP")
    parser.add_argument(
        "--ranks-per-node",
        type=positive_int,
        metavar="R",
        help="expert-parallel ranks of one node; fewer than EP: nodes are fitted first (default: EP)",
    )
    parser.add_argument(
        "--num-experts", type=positive_int, metavar="E", help="experts of a layer (default: largest id + 1)"
    )
    parser.add_argument(
        "--num-tokens",
        type=positive_int,
        default=USUAL_TOKENS,
        metavar="N",
        help=f"tokens to fit from (default: {USUAL_TOKENS})",
    )
    parser.add_argument(
        "--load-tolerance",
        type=_tolerance,
        default=0.05,
        metavar="X",
        help="allowed rise of max/mean rank load over contiguous on the fit tokens (default: 0.05)",
    )
    parser.add_argument(
        "--rows-only",
        action="store_true",
        help="fit for the fewest rows alone, not for token shuffling as well (tables are written all the same)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="default: megatron-ciera")
    parser.add_argument(
        "--report", type=plot_file, metavar="PATH", help="write an HTML report with plots (extra `plots`)"
    )
    parser.add_argument(
        "--config", metavar="YAML", help="file whose `cluster:` gives link speeds for the gains in the report"
    )
    parser.add_argument(
        "--hidden-size", type=positive_int, default=4096, metavar="H", help="for the report (default: 4096)"
    )
    parser.add_argument(
        "--output",
        type=_placement_file,
        default="placement.json",
        metavar="PATH",
        help="the placement; for training its prediction tables go beside it as .npz (default: placement.json)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    return parser


def main(argv=None) -> int:
    """Runs the command line; returns the exit status."""
    return cli_common.run(_main, argv)


def _main(argv) -> int:
    args = build_parser().parse_args(argv)
    try:
        return _fit(args)
    except NoGainError as error:
        more = max(USUAL_TOKENS, 2 * args.num_tokens)
        raise ValueError(
            f"{error}. Nothing was written. Fit from more tokens: --num-tokens {more}, of a recording that leaves "
            "others to judge it on"
        ) from None


def _fit(args) -> int:
    start = time.perf_counter()
    is_for_training = args.format == FORMATS[0]
    if Path(args.output).resolve() in [Path(trace).resolve() for trace in args.traces]:
        raise ValueError(f"--output {args.output}: this is the trace itself; name another file")
    if is_for_training:
        _check_tables_path(args.output)
    cluster = _cluster(args.config)
    reader = cli_common.open_trace_arguments(args)
    with cli_common.Progress("reading", "token", args.num_tokens) as progress:
        tokens = read_tokens(reader, args.skip_tokens, args.num_tokens, progress)
    notes = [*reader.notes]
    if args.num_tokens < _FEW_TOKENS:
        notes.append(
            f"--num-tokens {args.num_tokens}: few to fit from, the default is {USUAL_TOKENS}; judge this placement "
            "on other tokens (ciera-evaluate-placement) before it is used"
        )
    for note in notes:
        say(f"note: {note}")
    ranks_per_node = args.ranks_per_node or args.expert_parallel_size
    num_experts = args.num_experts or infer_num_experts(tokens.top_indices)
    check_shape(num_experts, tokens.top_indices.shape[2], args.expert_parallel_size, ranks_per_node)
    num_workers = len(os.sched_getaffinity(0))
    with cli_common.Progress("fitting", "layer", len(tokens.layer_ids)) as progress:
        result = fit_layers(
            tokens.top_indices,
            args.expert_parallel_size,
            ranks_per_node,
            args.load_tolerance,
            args.seed,
            num_experts=num_experts,
            layer_ids=tokens.layer_ids,
            num_workers=num_workers,
            fit_info={
                "source": tokens.source,
                "iteration": tokens.iteration,
                "skip_tokens": args.skip_tokens,
                "first_tokens": tokens.digest,
            },
            source_layers=tokens.source_layers,
            progress=progress,
            for_shuffling=not args.rows_only,
        )
        needs_tables = is_for_training or args.report
        tables = fit_tables(tokens.top_indices, result.placement, num_workers) if needs_tables else None
    write_placement(args.output, result.placement, args.format)
    if is_for_training:
        save_tables(_tables_path(args.output), tables, result.placement)
    if args.report:
        write_report(args.report, tokens.top_indices, result, tables, cluster, args.hidden_size)
    seconds = time.perf_counter() - start
    if args.json:
        print(json.dumps(_summary(args, result, seconds)))
    else:
        _print_table(args, result, seconds, reader.ranks)
    return 0


def _cluster(path: str | None) -> dict | None:
    """The `cluster:` section of a config file; raises ValueError when it lacks link speeds."""
    if path is None:
        return None
    import yaml

    with open(path) as file:
        document = yaml.safe_load(file)
    cluster = document.get("cluster") if isinstance(document, dict) else None
    for link in ("intra_node", "inter_node"):
        if not isinstance(cluster, dict) or "bandwidth_gb_s" not in (cluster.get(link) or {}):
            raise ValueError(f"--config {path}: no cluster: {link}: bandwidth_gb_s; add the link speeds")
    return cluster


def _summary(args, result, seconds: float) -> dict:
    return {
        "output": args.output,
        "num_tokens": args.num_tokens,
        "expert_parallel_size": args.expert_parallel_size,
        "layers": [
            {
                "layer": layer.layer_id.layer,
                **({"block": layer.layer_id.block} if layer.layer_id.block != "decoder" else {}),
                "rows_removed_contiguous": layer.rows_removed_contiguous,
                "rows_removed": layer.rows_removed,
                "rank_load_contiguous": layer.rank_load_contiguous,
                "rank_load": layer.rank_load,
                "changed": layer.changed,
            }
            for layer in result.layers
        ],
        "seconds": seconds,
    }


def _print_table(args, result, seconds: float, ranks) -> None:
    placement = result.placement
    limit = "no limit" if math.isinf(args.load_tolerance) else f"+{args.load_tolerance:g}"
    print(
        f"{placement.num_experts} experts, top-{placement.topk}, {placement.expert_parallel_size} ranks, "
        f"{args.num_tokens} fit tokens{of_ranks(ranks)}, rank load {limit}"
    )
    print("                 rows removed            rank load (max/mean)   held out")
    print("layer            contiguous  placed      contiguous  placed     gain")
    for layer in result.layers:
        gain = f"{percent(layer.held_out_gain)} ({layer.held_out_sigmas:.1f} s.e.)"
        print(
            f"{layer.layer_id!s:<16} {percent(layer.rows_removed_contiguous):>10}  "
            f"{percent(layer.rows_removed):>6}      {layer.rank_load_contiguous:>10.2f}  "
            f"{layer.rank_load:>6.2f}"
            f"     {gain if layer.changed else 'left contiguous: ' + gain}"
        )
    print(f"wrote {args.output} in {seconds:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
