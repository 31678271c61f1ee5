"""How much of the weights changes between two consecutive snapshots, and what each codec would send for it.

BEFORE and AFTER are `.npz` of uint16 bf16 bits, `.pt`, safetensors, or Megatron torch_dist checkpoints. Every
codec really encodes and decodes every tensor; the exit status is 1 if one bit comes out wrong.
"""

import argparse
import json
import sys

from megatron_ciera.param_gather.codec.snapshots import load_pair
from megatron_ciera.param_gather.codec.stability import CODECS, measure
from megatron_ciera.param_gather.layout import parameter_class
from placement.cli_common import plot_file


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", metavar="BEFORE")
    parser.add_argument("after", metavar="AFTER")
    parser.add_argument(
        "--block-size", type=int, default=512, help="values of one exponent block (default 512)"
    )
    parser.add_argument(
        "--plot", type=plot_file, metavar="F", help="write a picture (.png, .svg or .pdf; needs matplotlib)"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on standard output and nothing else"
    )
    return parser.parse_args(argv)


def print_table(report: dict) -> None:
    sizes = list(report["total"]["block_change_rate"])
    columns = [f"block {size}" for size in sizes] + list(CODECS)
    print(
        f"{'class':12}{'values':>12}{'same':>8}{'exponent':>10}" + "".join(f"{name:>16}" for name in columns)
    )
    for name, row in (*report["classes"].items(), ("total", report["total"])):
        print(
            f"{name:12}{row['values']:12}{row['same_value_rate']:8.1%}{row['exponent_change_rate']:10.2%}"
            + "".join(f"{row['block_change_rate'][size]:16.3f}" for size in sizes)
            + "".join(f"{row['bits_per_value'][codec]:16.3f}" for codec in CODECS)
        )
    shards = ", ".join(f"1/{count}: {rate:.3f}" for count, rate in report["shard_change_rate"].items())
    print(f"shards with a changed exponent, by their part of a tensor: {shards}")
    print(
        "bits a value are of all payload bytes; decoding was "
        + ("bit-exact" if report["bitwise_exact"] else "WRONG")
    )


def plot(report: dict, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (shards, blocks, bits) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    counts = list(map(int, report["shard_change_rate"]))
    shards.plot(counts, list(report["shard_change_rate"].values()), marker="o")
    shards.set(xscale="log", xlabel="shards a tensor", ylabel="share with a changed exponent", ylim=(0, 1.02))
    shards.set_title("whole shards")
    names = list(report["classes"])
    sizes = list(report["total"]["block_change_rate"])
    for column, size in enumerate(sizes):
        heights = [report["classes"][name]["block_change_rate"][size] for name in names]
        blocks.bar(
            [place + 0.4 * column for place in range(len(names))], heights, 0.4, label=f"{size} values"
        )
    blocks.set_title("blocks with a changed exponent")
    for column, codec in enumerate(CODECS):
        heights = [report["classes"][name]["bits_per_value"][codec] for name in names]
        bits.bar(
            [place + 0.27 * column for place in range(len(names))],
            heights,
            0.27,
            label=codec.replace("_", " "),
        )
    bits.set_title("bits a value")
    for axes in (blocks, bits):
        axes.set_xticks([place + 0.25 for place in range(len(names))], names, rotation=30)
        axes.legend()
    figure.savefig(path)


def main(argv=None) -> int:
    """The command line of scripts/measure_stability.py; returns the exit status: 0, 1 if a codec lost a bit, 2 for
    snapshots that cannot be compared."""
    args = parse(argv)
    try:
        report = measure(load_pair(args.before, args.after), parameter_class, args.block_size)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.plot:
        plot(report, args.plot)
    if args.json:
        json.dump(report, sys.stdout)
        print()
    else:
        print_table(report)
    return 0 if report["bitwise_exact"] else 1
