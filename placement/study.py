"""Formation and stability of coupling over training: `python -m placement.study TRACE.npz --plot F.png`.

Fits on the first 4,096 tokens of every array `stepN` and evaluates on tokens from 16,384 of the last, for
placement and for prediction; then varies the number of fit tokens, all evaluated on tokens from 32,768 of the last.
"""

import argparse
import json
import re
import sys

import numpy as np

from placement.cli_common import plot_file
from placement.co_selection import co_selection, next_expert_shares, pearson
from placement.fit import fit_layers, infer_num_experts
from placement.plots import new_figure
from placement.prediction import LocalityCounter, fit_tables
from placement.rows import contiguous_expert_to_rank, rows_removed

_FIT_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
_FIRST_UNSEEN = 16384


def study(arrays: dict, num_ranks: int, num_workers: int = 2) -> dict:
    """`arrays`: step -> [layers, tokens, topk] of the same tokens. Returns the numbers of the plot.

    Raises:
        ValueError: no arrays, or too few tokens in the last one to leave unseen ones.
    """
    found = arrays[max(arrays)].shape[1] if arrays else 0
    if found <= max(_FIT_TOKENS):
        raise ValueError(
            f"trace: {found} tokens in the last array stepN, wanted more than {max(_FIT_TOKENS)}; record more"
        )
    last = max(arrays)
    unseen, unseen_by_all = arrays[last][:, _FIRST_UNSEEN:], arrays[last][:, max(_FIT_TOKENS) :]
    num_experts = infer_num_experts(arrays[last])
    contiguous = contiguous_expert_to_rank(num_experts, num_ranks)

    def measure(fit_tokens, unseen):
        placement = fit_layers(
            fit_tokens, num_ranks, num_experts=num_experts, num_workers=num_workers, for_shuffling=True
        ).placement
        removed = [rows_removed(t, placement.expert_to_rank(i)) for i, t in enumerate(unseen)]
        counter = LocalityCounter(placement, fit_tables(fit_tokens, placement, num_workers))
        counter.add(unseen)
        locality = [found[1] for found in counter.results() if found]
        matrices = [
            pearson(co_selection(f, num_experts), co_selection(u, num_experts))
            for f, u in zip(fit_tokens, unseen, strict=True)
        ]
        return {
            "rows_removed": float(np.mean(removed)),
            "locality": float(np.mean(locality)) if locality else None,
            "pearson": float(np.mean(matrices)),
        }

    shares = [next_expert_shares(a, b, num_experts) for a, b in zip(unseen[:-1], unseen[1:], strict=True)]
    return {
        "rows_removed_contiguous": float(np.mean([rows_removed(t, contiguous) for t in unseen])),
        "rows_removed_contiguous_by_fit_tokens": float(
            np.mean([rows_removed(t, contiguous) for t in unseen_by_all])
        ),
        "by_step": {step: measure(tokens[:, :4096], unseen) for step, tokens in sorted(arrays.items())},
        "by_fit_tokens": {n: measure(arrays[last][:, :n], unseen_by_all) for n in _FIT_TOKENS},
        "next_expert_share_median": float(np.nanmedian(shares)),
        "next_expert_share_over_30_percent": float(np.nanmean(np.asarray(shares) >= 0.3)),
    }


def plot_study(path, found: dict, title: str) -> None:
    """Writes the study as one PNG: against the step, and against the number of fit tokens."""
    figure, axes = new_figure(2, 5.0)
    panels = (
        ("by_step", "fitted at step", "rows_removed_contiguous"),
        ("by_fit_tokens", "fit tokens", "rows_removed_contiguous_by_fit_tokens"),
    )
    for axis, (key, label, contiguous) in zip(axes, panels, strict=True):
        points = found[key]
        for name in ("rows_removed", "locality", "pearson"):
            axis.plot(list(points), [p[name] for p in points.values()], marker="o", label=name)
        axis.axhline(found[contiguous], color="grey", linestyle=":", label="contiguous rows")
        axis.set(xlabel=label, ylim=(0, None), title=title)
    axes[1].set_xscale("log", base=2)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main(argv=None) -> int:
    """Runs the study from the command line and prints its numbers as JSON."""
    parser = argparse.ArgumentParser(prog="placement.study", description=__doc__)
    parser.add_argument("trace", help=".npz with arrays stepN of [layers, tokens, topk]")
    parser.add_argument("--expert-parallel-size", type=int, default=8)
    parser.add_argument("--plot", type=plot_file, required=True)
    args = parser.parse_args(argv)
    with np.load(args.trace) as stored:
        arrays = {int(n[4:]): stored[n] for n in stored.files if re.fullmatch(r"step\d+", n)}
    try:
        found = study(arrays, args.expert_parallel_size)
    except ValueError as error:
        print(f"placement.study: error: {args.trace}: {error}", file=sys.stderr)
        return 2
    plot_study(args.plot, found, f"{args.expert_parallel_size} ranks")
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
