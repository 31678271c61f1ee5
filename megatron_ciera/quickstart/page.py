"""report.html of the quickstart, and the table printed at its end."""

import html
from pathlib import Path

import numpy as np

from megatron_ciera.quickstart import runs, summary
from megatron_ciera.quickstart.runs import Plan
from megatron_ciera.report.page import figure, page, table_html
from placement import load_placement
from placement.co_selection import co_selection
from placement.trace import open_trace, read_tokens


def rows(report: dict) -> list[tuple[str, str, str]]:
    """(what, value, what it means) for the table."""
    ciera, placement, dispatch = report["ciera"], report["placement"], report["dispatch"]
    saved = 1 - dispatch["rows_sent"] / dispatch["rows_stock"]
    return [
        (
            "parameter bits, plain vs --ciera",
            "identical" if ciera["bitwise_identical"] else "DIFFERENT",
            "every rank",
        ),
        (
            "loss difference, plain vs --ciera",
            f"{ciera['loss_max_abs_diff']:g}",
            f"{ciera['iterations']} iterations",
        ),
        ("parameter gather, bytes plain", f"{ciera['bytes_raw']:,}", "all ranks"),
        ("parameter gather, bytes --ciera", f"{ciera['bytes_sent']:,}", f"ratio {ciera['ratio']:.3f}"),
        ("raw fallbacks", f"{ciera['raw_fallbacks']}", "warm-up not counted"),
        (
            "rows removed, contiguous experts",
            f"{placement['rows_removed_contiguous']:.1%}",
            "tokens not in the fit",
        ),
        (
            "rows removed, correlated placement",
            f"{placement['rows_removed_correlated']:.1%}",
            "tokens not in the fit",
        ),
        (
            "rank load, contiguous / correlated",
            f"{placement['rank_load_contiguous']:.3f} / {placement['rank_load_correlated']:.3f}",
            "max / mean",
        ),
        ("rows dispatched in training", f"{dispatch['rows_sent']:,}", f"{saved:.1%} less than stock"),
        (
            "loss difference, plain vs dispatch run",
            f"{dispatch['loss_max_abs_diff']:.2e}",
            f"stock vs stock, experts permuted: {dispatch['loss_max_abs_diff_stock']:.2e}",
        ),
    ]


def table(report: dict) -> str:
    """The table for a terminal."""
    lines = rows(report)
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join(f"{what:{widths[0]}}  {value:>{widths[1]}}  {note}" for what, value, note in lines)


def write(plan: Plan, outcome, path: Path) -> None:
    """Writes one self-contained HTML file."""
    sections = [
        ("In short", table_html(("", "", ""), rows(outcome.report))),
        ("Losses", _losses(plan)),
        ("Bytes of the parameter gather, per iteration", _bytes(plan)),
        ("Rows removed, per MoE layer", _rows_removed(outcome)),
        ("Co-selection of experts", _co_selection(plan, outcome)),
        ("Seconds", table_html(("step", "seconds"), [(k, f"{v:.1f}") for k, v in outcome.seconds.items()])),
        (
            "Commands",
            f"<p>Each run's command and log are in <code>{html.escape(str(plan.folder / 'runs'))}</code>.</p>",
        ),
    ]
    path.write_text(page("megatron-ciera quickstart", sections))


def _losses(plan: Plan) -> str:
    def draw(axes):
        trained = summary.losses(plan, "train")
        axes.plot(trained.keys(), trained.values(), color="0.6", label="before the checkpoint")
        styles = {"plain": "-", "ciera": "--", "dispatch": ":"}
        for name, style in styles.items():
            curve = summary.losses(plan, name)
            axes.plot(curve.keys(), curve.values(), style, label=name, linewidth=2)
        axes.set_xlabel("iteration")
        axes.set_ylabel("lm loss")
        axes.legend()

    return figure(draw, "Loss curves; plain and ciera lie on top of each other, bit for bit.")


def _bytes(plan: Plan) -> str:
    def draw(axes):
        for key, label in (("ciera/bytes_raw", "plain gather"), ("ciera/bytes_sent", "--ciera")):
            values = np.array(summary.series(plan, "ciera", key)) / 1e6
            axes.step(
                range(plan.train_iterations + 1, plan.last_iteration + 1), values, where="mid", label=label
            )
        axes.set_xlabel("iteration")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("MB, all ranks")
        axes.set_ylim(bottom=0)
        axes.legend()

    return figure(
        draw, "Everything on the wire is counted: padding, headers, sizes, raw gathers of the warm-up."
    )


def _rows_removed(outcome) -> str:
    layers = outcome.evaluation["layers"]
    numbers = np.array([layer["layer"] for layer in layers])

    def draw(axes):
        for offset, key, label in (
            (-0.2, "rows_removed_contiguous", "contiguous"),
            (0.2, "rows_removed", "correlated"),
        ):
            axes.bar(numbers + offset, [layer[key] for layer in layers], 0.4, label=label)
        axes.set_xlabel("MoE layer")
        axes.set_ylabel("share of rows removed")
        axes.set_xticks(numbers)
        axes.legend(loc="lower right")

    return figure(draw, f"On tokens that the fit has not seen; expert-parallel size {runs.EXPERT_PARALLEL}.")


def _co_selection(plan: Plan, outcome) -> str:
    """The layer that gains most, experts in the order of their slots before and after placement."""
    tokens = read_tokens(
        open_trace([plan.trace]), outcome.fit_first_token, outcome.report["placement"]["fit_tokens"]
    )
    placement = load_placement(plan.placement)
    gains = [
        after["rows_removed"] - after["rows_removed_contiguous"] for after in outcome.evaluation["layers"]
    ]
    best = int(np.argmax(gains))
    matrix = co_selection(tokens.top_indices[best], runs.NUM_EXPERTS)
    slots = placement.layers[best].physical_to_logical_map
    orders = (("contiguous", np.arange(runs.NUM_EXPERTS)), ("correlated", slots))
    per_rank = runs.NUM_EXPERTS // runs.EXPERT_PARALLEL

    def draw(*both):
        for axes, (title, order) in zip(both, orders, strict=True):
            axes.imshow(matrix[np.ix_(order, order)], cmap="viridis")
            for edge in range(per_rank, runs.NUM_EXPERTS, per_rank):
                axes.axhline(edge - 0.5, color="white")
                axes.axvline(edge - 0.5, color="white")
            axes.set_title(title)
            axes.set_xlabel("slot")

    note = f"MoE layer {best}: tokens that select both experts; the lines part the ranks."
    return figure(draw, note, columns=2)
