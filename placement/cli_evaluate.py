"""Command line: evaluate a placement on tokens it has not seen (scripts/evaluate_placement.py)."""

import argparse
import json
import sys
from pathlib import Path

from placement import cli_common
from placement.cli_common import percent, positive_int, say
from placement.evaluate import evaluate, evaluate_loads, layers_in_trace
from placement.file import Placement
from placement.load_file import read_loads
from placement.megatron_trace import is_megatron_trace
from placement.table_file import load_tables
from placement.trace import Watch, iterate_tokens


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Counts rows sent and rank load of a placement on a routing trace."
    )
    parser.add_argument("placement", metavar="PLACEMENT", help="file written by ciera-fit-placement")
    cli_common.add_trace_arguments(parser)
    parser.add_argument(
        "--num-tokens", type=positive_int, metavar="N", help="tokens to evaluate on (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    return parser


def main(argv=None) -> int:
    """Runs the command line; returns the exit status."""
    return cli_common.run(_main, argv)


def _main(argv) -> int:
    args = build_parser().parse_args(argv)
    if is_megatron_trace(Path(args.placement)):
        raise ValueError(
            f"PLACEMENT {args.placement}: found a routing trace, wanted a placement; give the placement first, "
            "traces behind it"
        )
    placement = Placement.load(args.placement)
    loads = read_loads(args.traces)
    report, notes = _evaluate_loads(placement, loads, args) if loads else _evaluate_trace(placement, args)
    for note in notes:
        (say if args.json else print)(f"note: {note}")
    if args.json:
        print(json.dumps(report))
    else:
        _print_table(placement, report)
    return 0


def _evaluate_loads(placement: Placement, loads, args) -> tuple[dict, list[str]]:
    asked = {"--array": args.array, "--skip-tokens": args.skip_tokens, "--num-tokens": args.num_tokens}
    for flag, value in asked.items():
        if value:
            raise ValueError(
                f"{flag} {value}: {loads.source} holds expert loads ({loads.name}) and no tokens"
            )
    note = (
        f"{loads.source} holds expert loads only ({loads.name}), which do not say which experts are "
        "selected together: rank load is evaluated, rows removed and locality are not"
    )
    return evaluate_loads(placement, loads.loads), [note]


def _evaluate_trace(placement: Placement, args) -> tuple[dict, list[str]]:
    tables = load_tables(placement.tables_path, placement)
    reader = cli_common.open_trace_arguments(args)
    rows = layers_in_trace(placement, reader.layer_ids, reader.source_layers)
    fit, counted = placement.fit, _Counted()
    watch = Watch(fit["skip_tokens"], fit["first_tokens"]) if "first_tokens" in fit else None
    with cli_common.Progress("evaluating", "token", args.num_tokens) as progress:
        blocks = iterate_tokens(reader, args.skip_tokens, args.num_tokens, watch)
        report = evaluate(placement, counted.count(blocks, progress), rows, tables)
    is_fit_trace = watch.found if watch else fit.get("source") == reader.source
    notes = _seen_by_fit(fit, args.skip_tokens, counted.num_tokens) if is_fit_trace else []
    notes += _worse_layers(placement, report, counted.num_tokens)
    if tables is None:
        notes.append(
            f"no {placement.tables_path} beside the placement: the fit wrote prediction tables there, without "
            "which locality cannot be predicted (-); keep the two files together"
        )
    return report, notes + reader.notes


class _Counted:
    num_tokens = 0

    def count(self, blocks, progress):
        for block in blocks:
            yield block
            self.num_tokens += block.shape[1]
            progress(self.num_tokens)


def _seen_by_fit(fit: dict, first: int, num_tokens: int) -> list[str]:
    """A note when tokens of the fit are among the `num_tokens` evaluated from `first`."""
    fit_first = fit.get("skip_tokens") or 0
    fit_end = fit_first + (fit.get("tokens") or 0)
    seen = min(fit_end, first + num_tokens) - max(fit_first, first)
    if seen <= 0:
        return []
    return [
        f"{seen} of these {num_tokens} tokens are those that the placement was fitted on, where it looks better "
        f"than it is; leave them out with --skip-tokens {fit_end}"
    ]


def _worse_layers(placement: Placement, report: dict, num_tokens: int) -> list[str]:
    """A note when layers send more rows than with contiguous experts, beyond chance.

    A token's two shares of rows differ by at most 1 and by chance about 0.5: two standard errors.
    """
    chance = num_tokens**-0.5
    worse = [
        str(layer.layer_id)
        for layer, found in zip(placement.layers, report["layers"], strict=True)
        if found["rows_removed"] < found["rows_removed_contiguous"] - chance
    ]
    if not worse:
        return []
    return [
        f"{', '.join(worse)}: fewer rows removed than with contiguous experts. Either routing has moved on since the "
        "fit, or the fit had too few tokens: fit again from later routing, from more tokens"
    ]


def _print_table(placement: Placement, report: dict) -> None:
    print(f"{placement.num_experts} experts, top-{placement.topk}, {placement.expert_parallel_size} ranks")
    print("                 rows removed          rank load (max/mean)  locality")
    print("layer            contiguous  placed    contiguous  placed    contiguous  predicted")
    names = [str(layer.layer_id) for layer in placement.layers] + ["mean"]
    for name, entry in zip(names, [*report["layers"], report], strict=True):
        print(
            f"{name:<16} {percent(entry['rows_removed_contiguous']):>10}  {percent(entry['rows_removed']):>6}"
            f"    {entry['rank_load_contiguous']:>10.2f}  {entry['rank_load']:>6.2f}"
            f"    {percent(entry['locality_contiguous']):>10}  {percent(entry['locality']):>9}"
        )


if __name__ == "__main__":
    sys.exit(main())
