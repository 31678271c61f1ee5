"""The sections of a run's report. Each returns HTML, or None when the run has nothing for it."""

import html
import math

from megatron_ciera.report import summary
from megatron_ciera.report.console_log import PrintedDecision, Series
from megatron_ciera.report.page import figure, page, table_html
from megatron_ciera.report.run_log import EQUALITY, RunLog

_SMALL = (5.2, 3.1)
_GREY, _BLUE, _ORANGE, _PURPLE = "#8a939c", "#1f6feb", "#c66a00", "#7a3e9d"
_MOST_MESSAGES = 300
_SOURCE = {
    "observed": "folder of MEGATRON_CIERA_OBSERVE",
    "tensorboard": "TensorBoard events",
    "console": "console log",
}


def document(run: RunLog, baseline: RunLog | None, found: dict, title: str) -> str:
    """The whole page. found: what summary.summarise returned for the two."""
    sections = [
        ("In short", table_html(("", "", ""), summary.rows(found))),
        ("Losses", _losses(run, baseline)),
        ("Time per step", _time(run, baseline)),
        ("Parameter gather", _gather(run)),
        ("Decisions of selection", _decisions(run)),
        ("Dispatch of tokens", _dispatch(run, baseline)),
        ("Layers", _layers(run, baseline)),
        ("What the run said", _messages(run)),
        ("Files", _files(run, baseline)),
    ]
    return page(title, [(heading, body) for heading, body in sections if body])


def _losses(run: RunLog, baseline: RunLog | None) -> str:
    source = (
        summary.shared_source(run, baseline) if baseline else next(s for s in EQUALITY if s in run.losses)
    )
    mine = run.losses[source]
    name = "lm loss" if "lm loss" in mine else next(iter(mine))
    other = baseline.losses[source].get(name, {}) if baseline else {}

    def curves(axes):
        if other:
            _line(axes, other, "baseline", _GREY, linewidth=3)
        _line(axes, mine[name], "this run", _BLUE, linewidth=1.3)
        _finish(axes, name)

    figures = [figure(curves, f"{name}, from the {_SOURCE[source]}.", size=_SMALL)]
    apart = {i: mine[name][i] - other[i] for i in sorted(mine[name].keys() & other.keys())}
    if any(value != 0 for value in apart.values()):

        def difference(axes):
            _line(axes, apart, "this run − baseline", _ORANGE)
            axes.axhline(0, color=_GREY, linewidth=0.8)
            _finish(axes, "difference")

        figures.append(figure(difference, f"Difference of {name}.", size=_SMALL))
    elif run.grad_norm.get(source):
        figures.append(_gradient_norms(run, baseline, source))
    others = ", ".join(n for n in mine if n != name)
    note = f"Also compared: {others}." if others and baseline else ""
    return _figures(figures) + _note(note)


def _gradient_norms(run: RunLog, baseline: RunLog | None, source: str) -> str:
    def draw(axes):
        if baseline and baseline.grad_norm.get(source):
            _line(axes, baseline.grad_norm[source], "baseline", _GREY, linewidth=3)
        _line(axes, run.grad_norm[source], "this run", _BLUE, linewidth=1.3)
        _finish(axes, "gradient norm")

    return figure(draw, "Gradient norm before clipping.", size=_SMALL)


def _time(run: RunLog, baseline: RunLog | None) -> str | None:
    if not run.seconds:
        return None
    both = [each for each in (run, baseline) if each and each.seconds]
    shown = sorted(value for each in both for value in _without_first(each.seconds).values())
    limit = 1.5 * shown[math.ceil(0.95 * (len(shown) - 1))]

    def draw(axes):
        if baseline and baseline.seconds:
            _line(axes, baseline.seconds, "baseline", _GREY)
        _line(axes, run.seconds, "this run", _BLUE)
        _mark_moves(axes, run)
        axes.set_ylim(0, limit)
        _finish(axes, "seconds")

    note = ""
    if any(value > limit for each in both for value in each.seconds.values()):
        note = "Some iterations took longer than the scale shows; the first compiles and connects."
    if run.on_cpu:
        note += " This run was on CPU: its times say nothing about GPUs."
    return _figures([figure(draw, "Seconds per step, as Megatron logs them.", size=_SMALL)]) + _note(
        note.strip()
    )


def _without_first(series: Series) -> Series:
    first = min(series, default=None)
    return {i: value for i, value in series.items() if i != first or len(series) == 1}


def _gather(run: RunLog) -> str | None:
    raw, sent = run.of("ciera/bytes_raw"), run.of("ciera/bytes_sent")
    if not raw or not any(raw.values()):
        return None

    def volume(axes):
        for series, label, colour in ((raw, "plain gather", _GREY), (sent, "--ciera", _BLUE)):
            _line(axes, {i: value / 1e6 for i, value in series.items()}, label, colour, steps=True)
        _from_zero(axes)
        _finish(axes, "MB, all ranks")

    figures = [
        figure(
            volume,
            "Per logged iteration. Everything on the wire: padding, headers, sizes, raw gathers.",
            size=_SMALL,
        )
    ]
    times = {name: run.of(f"ciera/{name}_ms") for name in ("encode", "gather", "decode")}
    if any(any(series.values()) for series in times.values()):

        def spent(axes):
            for (name, series), colour in zip(times.items(), (_ORANGE, _GREY, _BLUE), strict=True):
                _line(axes, series, name, colour)
            _from_zero(axes)
            _finish(axes, "ms, slowest rank")

        figures.append(figure(spent, "Device time of a gather; spans may overlap.", size=_SMALL))
    fallbacks = [
        (reason, f"{run.total(f'ciera/raw_fallbacks/{reason}'):,.0f}")
        for reason in ("unsupported", "invalidated", "incompressible")
        if run.total(f"ciera/raw_fallbacks/{reason}")
    ]
    table = table_html(("raw fallbacks", "gathers"), fallbacks, numbers=True) if fallbacks else ""
    return _figures([*figures, *_classes(summary.last_decisions(run))]) + table


def _classes(decisions: list[PrintedDecision]) -> list[str]:
    """The figure of ratios by tensor class, or none before a decision."""
    rows = [(decision, row) for decision in decisions for row in decision.rows]
    if not rows:
        return []
    kinds = [row.kind for _, row in rows]
    names = [
        row.kind if kinds.count(row.kind) == 1 else f"{row.kind}, {decision.group.split(',')[0]}"
        for decision, row in rows
    ]

    def draw(axes):
        ratios = [row.ratio for _, row in rows]
        bars = axes.barh(names, ratios, color=[_BLUE if row.compressed else _GREY for _, row in rows])
        axes.bar_label(bars, [f"{ratio:.3f}" for ratio in ratios], padding=3)
        axes.set_xlim(0, max(1.15, max(ratios) * 1.15))
        axes.axvline(1, color=_GREY, linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel("bytes sent / raw bytes")

    size = (_SMALL[0], max(1.6, 0.7 + 0.4 * len(rows)))
    caption = (
        "Ratio by tensor class: expected at the latest decision, from samples of the weights. Grey: raw."
    )
    return [figure(draw, caption, size=size)]


def _decisions(run: RunLog) -> str | None:
    parts = []
    for decision in summary.last_decisions(run):
        if not decision.rows:
            continue
        count = sum(other.group == decision.group for other in run.decisions)
        when = (
            f"after iteration {decision.after_iteration}"
            if decision.after_iteration
            else "before the first log"
        )
        header = ("class", "segments", "compressed", "exponents changed", "blocks changed", "ratio")
        header += (f"gain, {decision.unit}", "codec")
        rows = [
            (
                *(row.kind, f"{row.segments}", f"{row.compressed}"),
                *(f"{row.exponents_changed:.2%}", f"{row.blocks_changed:.2%}"),
                *(f"{row.ratio:.3f}", f"{row.gain:,.1f}", row.codec),
            )
            for row in decision.rows
        ]
        again = "" if count == 1 else f", the latest of {count}"
        parts.append(f"<h3>{html.escape(decision.group)}</h3>{_note(f'Decided {when}{again}.')}")
        parts.append(table_html(header, rows, numbers=True))
    return "".join(parts) or None


def _dispatch(run: RunLog, baseline: RunLog | None) -> str | None:
    removed = run.of("moe/rows_removed")
    if not removed:
        return None

    def share(axes):
        if baseline and baseline.of("moe/rows_removed"):
            _line(axes, _percent(baseline.of("moe/rows_removed")), "baseline", _GREY)
        _line(axes, _percent(removed), "this run", _BLUE)
        _mark_moves(axes, run)
        _finish(axes, "% of rows")

    caption = "Rows removed: one row per (token, rank) instead of one per (token, expert). Mean over layers."
    figures = [figure(share, caption, size=_SMALL)]
    links = (
        ("bytes_intra_node", "inside nodes", _GREY),
        ("bytes_inter_node", "between nodes", _BLUE),
    )
    if any(any(run.of(f"moe/{name}").values()) for name, _, _ in links):

        def volume(axes):
            for name, label, colour in links:
                series = run.of(f"moe/{name}")
                if any(series.values()):
                    _line(axes, {i: value / 1e6 for i, value in series.items()}, label, colour)
            _mark_moves(axes, run)
            _from_zero(axes)
            _finish(axes, "MB, all ranks")

        figures.append(
            figure(volume, "Dispatch and combine of the forward pass, per logged iteration.", size=_SMALL)
        )
    return _figures(figures)


def _layers(run: RunLog, baseline: RunLog | None) -> str | None:
    panels = (
        ("rows_removed", "Rows removed: 1 − rows / (tokens × top-k).", "% of rows", 100),
        ("rank_load", "Rank load: largest over ranks / mean of assignments.", "max / mean", 1),
        ("locality", "Locality: assignments to experts on the token's own rank.", "% of assignments", 100),
    )
    figures = []
    for metric, caption, unit, scale in panels:
        layers = run.layers(f"moe/{metric}")
        if not layers:
            continue
        series = {"baseline": _layer_means(baseline.layers(f"moe/{metric}"), baseline)} if baseline else {}
        if moved := summary.moves(run):
            before = {name: {i: v for i, v in s.items() if i <= moved[0]} for name, s in layers.items()}
            series["before experts moved"] = _layer_means(before, None)
        by_position = run.layers(f"moe/{metric}_by_position")
        series["by position"] = _layer_means(by_position, run)
        series["this run" if not moved else "after"] = _layer_means(layers, run)
        figures.append(figure(_by_layer(series, list(layers), unit, scale), caption, size=_SMALL))
    if not figures:
        return None
    moved = summary.moves(run)
    when = f"the iterations after {moved[-1]}, when experts last moved" if moved else "all logged iterations"
    return _note(f"Means over {when}.") + _figures(figures)


def _layer_means(layers: dict[str, Series], run: RunLog | None) -> dict[str, float]:
    values = {
        name: summary.settled(run, series) if run else list(series.values())
        for name, series in layers.items()
    }
    return {name: sum(found) / len(found) for name, found in values.items() if found}


def _by_layer(series: dict[str, dict[str, float]], names: list[str], unit: str, scale: float):
    colours = {"baseline": _GREY, "before experts moved": _ORANGE, "by position": _PURPLE}

    def draw(axes):
        for label, values in series.items():
            places = [place for place, name in enumerate(names) if name in values]
            if places:
                heights = [scale * values[names[place]] for place in places]
                axes.plot(places, heights, "o-", color=colours.get(label, _BLUE), label=label, markersize=4)
        every = max(1, math.ceil(len(names) / 12))
        shown = [name.removeprefix("layer_").replace("_", " ") for name in names[::every]]
        axes.set_xticks(range(0, len(names), every), shown)
        axes.set_xlabel("layer")
        axes.set_ylabel(unit)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize=8)

    return draw


def _messages(run: RunLog) -> str | None:
    if not run.messages:
        return None
    shown = list(dict.fromkeys(run.messages))
    rest = f"\n… {len(shown) - _MOST_MESSAGES} more" if len(shown) > _MOST_MESSAGES else ""
    return f"<pre>{html.escape(chr(10).join(shown[:_MOST_MESSAGES]))}{rest}</pre>"


def _files(run: RunLog, baseline: RunLog | None) -> str:
    rows = [("this run", str(path)) for path in run.files]
    rows += [("baseline", str(path)) for path in baseline.files] if baseline else []
    return table_html(("", ""), rows)


def _line(axes, series: Series, label: str, colour: str, steps: bool = False, **style) -> None:
    places = sorted(series)
    style |= {"drawstyle": "steps-mid"} if steps else {}
    if len(places) == 1:
        style |= {"marker": "o"}
    axes.plot(places, [series[i] for i in places], label=label, color=colour, **style)


def _mark_moves(axes, run: RunLog) -> None:
    for number, iteration in enumerate(summary.moves(run)):
        label = "experts moved" if number == 0 else None
        axes.axvline(iteration + 0.5, color=_ORANGE, linestyle=":", label=label)


def _from_zero(axes) -> None:
    axes.set_ylim(0, 1.1 * axes.dataLim.ymax or None)


def _finish(axes, unit: str) -> None:
    axes.set_xlabel("iteration")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _percent(series: Series) -> Series:
    return {i: 100 * value for i, value in series.items()}


def _figures(figures: list[str]) -> str:
    return f'<div class="figures">{"".join(figures)}</div>'


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>' if text else ""
