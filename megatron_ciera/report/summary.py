"""The numbers of a run's report: what --json prints, and the table that the page begins with."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from megatron_ciera.comparison import compare
from megatron_ciera.errors import ConfigurationError
from megatron_ciera.observe import read_parameters
from megatron_ciera.report.console_log import Series
from megatron_ciera.report.run_log import EQUALITY, RunLog

_MOVED = re.compile(r"MoE: (.+): experts moved in ([1-9]\d*) of \d+ layers")
_APPLIED = re.compile(r"applied after iteration (\d+)")


def summarise(run: RunLog, baseline: RunLog | None) -> dict:
    """All of it; parts that the run has nothing for are None.

    Raises:
        ConfigurationError: the two runs have no iteration, or no loss of the same source, in common.
    """
    return {
        "run": {
            "files": [str(path) for path in run.files],
            "iterations": len(run.iterations),
            "first": run.iterations[0],
            "last": run.iterations[-1],
            "on_cpu": run.on_cpu,
        },
        "baseline": baseline and {"files": [str(path) for path in baseline.files], "on_cpu": baseline.on_cpu},
        "losses": baseline and _losses(run, baseline),
        "seconds_per_step": typical_seconds(run),
        "seconds_per_step_baseline": baseline and typical_seconds(baseline),
        "ciera": _gather(run),
        "selection": [asdict(decision) for decision in last_decisions(run)] or None,
        "moe": _moe(run),
        "moe_baseline": baseline and _moe(baseline),
    }


def shared_source(run: RunLog, baseline: RunLog) -> str:
    """The most exact source of losses that both runs have, with iterations in common.

    Raises:
        ConfigurationError: there is none; the message names the files.
    """
    shared = [source for source in EQUALITY if source in run.losses and source in baseline.losses]
    if not shared:
        raise ConfigurationError(
            f"{run.name} has losses from {_and(run.losses)}, {baseline.name} from {_and(baseline.losses)}: these are "
            "not the same numbers. Give the console logs of both"
        )
    left, right = run.losses[shared[0]], baseline.losses[shared[0]]
    if not any(left[name].keys() & right[name].keys() for name in left.keys() & right.keys()):
        raise ConfigurationError(
            f"{run.name} has iterations {_span(run)}, {baseline.name} has {_span(baseline)}: none in common, so "
            "there is nothing to compare. Give a baseline of the same iterations, or leave --baseline out"
        )
    return shared[0]


def typical_seconds(run: RunLog) -> float | None:
    """Median step time over the second half of the logged iterations; None if no time was logged."""
    times = [run.seconds[i] for i in sorted(run.seconds)]
    return statistics.median(times[len(times) // 2 :]) if times else None


def last_decisions(run: RunLog) -> list:
    """The decision of selection in force at the end, for each group of buckets."""
    return list({decision.group: decision for decision in run.decisions}.values())


def moves(run: RunLog) -> list[int]:
    """Iterations after which experts moved during training."""
    found = [_APPLIED.search(said[1]) for said in map(_MOVED.match, run.messages) if said]
    return [int(applied[1]) for applied in found if applied]


def settled(run: RunLog, series: Series) -> list[float]:
    """Values of the iterations after the last move of experts, or all if experts moved after the last of them."""
    last = max(moves(run), default=0)
    return [value for i, value in series.items() if i > last] or list(series.values())


def _losses(run: RunLog, baseline: RunLog) -> dict:
    source = shared_source(run, baseline)
    left, right = run.losses[source], baseline.losses[source]
    names = [name for name in left if name in right]
    iterations = sorted({i for name in names for i in left[name].keys() & right[name].keys()})
    apart = [_apart(left[name], right[name]) for name in names]
    norms = _apart(run.grad_norm.get(source, {}), baseline.grad_norm.get(source, {}))
    found = {
        "source": source,
        "names": names,
        "iterations": len(iterations),
        "first": iterations[0],
        "last": iterations[-1],
        "loss_max_abs_diff": max(worst for worst, _ in apart),
        "first_different_iteration": min((i for _, i in apart if i is not None), default=None),
        "grad_norm_max_abs_diff": norms[0],
        "bitwise_identical": None,
        "first_difference": None,
    }
    if _has_digests(run) and _has_digests(baseline) and _cover_the_same(left, right):
        difference = compare(baseline.observed, run.observed)
        found |= {
            "bitwise_identical": difference.bitwise_identical,
            "first_difference": difference.first_difference,
        }
    return found


def _has_digests(run: RunLog) -> bool:
    """Whether the final parameters were observed; a run that ends by --exit-interval leaves none."""
    return run.observed is not None and bool(read_parameters(run.observed))


def _cover_the_same(left: dict[str, Series], right: dict[str, Series]) -> bool:
    return left.keys() == right.keys() and all(left[name].keys() == right[name].keys() for name in left)


def _apart(a: Series, b: Series) -> tuple[float, int | None]:
    """The largest difference over common iterations, and the first that differs. Two NaN are equal."""
    worst, first = 0.0, None
    for i in sorted(a.keys() & b.keys()):
        if a[i] == b[i] or (a[i] != a[i] and b[i] != b[i]):
            continue
        first = i if first is None else first
        gap = abs(a[i] - b[i])
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst, first


def _gather(run: RunLog) -> dict | None:
    raw, sent = run.total("ciera/bytes_raw"), run.total("ciera/bytes_sent")
    if not raw:
        return None
    return {
        "bytes_raw": int(raw),
        "bytes_sent": int(sent),
        "ratio": sent / raw,
        "ratio_at_the_end": _last_ratio(run),
        "raw_fallbacks": int(run.total("ciera/raw_fallbacks")),
    }


def _last_ratio(run: RunLog) -> float:
    """Over the last quarter of the logged iterations: what a long run tends to."""
    shown = sorted(run.of("ciera/bytes_raw"))
    last = shown[-max(1, len(shown) // 4) :]
    raw, sent = (sum(run.of(f"ciera/bytes_{which}")[i] for i in last) for which in ("raw", "sent"))
    return sent / raw if raw else 1.0


def _moe(run: RunLog) -> dict | None:
    if not run.of("moe/rows_removed"):
        return None
    by_layer = {}
    for metric in ("rows_removed", "rank_load", "locality", "locality_by_position"):
        layers = run.layers(f"moe/{metric}")
        by_layer |= {metric: {name: _mean(settled(run, s)) for name, s in layers.items()}} if layers else {}
    return {
        "rows_stock": int(run.total("moe/rows_stock")),
        "rows_sent": int(run.total("moe/rows_sent")) if run.of("moe/rows_sent") else None,
        "bytes_sent": int(run.total("moe/bytes_sent")) if run.of("moe/bytes_sent") else None,
        "rows_removed": _mean(settled(run, run.of("moe/rows_removed"))),
        "rank_load": _mean(settled(run, run.of("moe/rank_load"))),
        "placements_moved_after": moves(run),
        "before_moves": _before_moves(run),
        "layers": by_layer,
    }


def _before_moves(run: RunLog) -> dict | None:
    """What the shares were until experts moved for the first time; None if they did not, or moved at once."""
    first = min(moves(run), default=0)
    found = {}
    for name in _FORMS:
        values = [value for i, value in run.of(f"moe/{name}").items() if i <= first]
        found |= {name: _mean(values)} if values else {}
    return found or None


def rows(found: dict) -> list[tuple[str, str, str]]:
    """(what, value, note) for the table on top of the page."""
    run = found["run"]
    lines = [("iterations logged", f"{run['iterations']}", f"{run['first']} to {run['last']}")]
    if found["losses"]:
        lines += _loss_rows(found["losses"])
    lines += _time_rows(found)
    if gather := found["ciera"]:
        lines += [
            ("parameter gather, bytes plain", f"{gather['bytes_raw']:,}", "all ranks, all steps"),
            (
                "parameter gather, bytes sent",
                f"{gather['bytes_sent']:,}",
                f"ratio {gather['ratio']:.3f}, warm-up included; {gather['ratio_at_the_end']:.3f} at the end",
            ),
            ("raw fallbacks", f"{gather['raw_fallbacks']:,}", "warm-up not counted"),
        ]
    if moe := found["moe"]:
        lines += _moe_rows(moe, found["moe_baseline"])
    return lines


def _loss_rows(losses: dict) -> list[tuple[str, str, str]]:
    span = f"{losses['iterations']} iterations in common, {losses['first']} to {losses['last']}"
    equality = EQUALITY[losses["source"]]
    if losses["first_different_iteration"] is None:
        lines = [("losses against the baseline", f"equal {equality}", span)]
    else:
        note = f"first at iteration {losses['first_different_iteration']}; {span}"
        lines = [("largest loss difference", f"{losses['loss_max_abs_diff']:.3g}", note)]
    if losses["bitwise_identical"] is not None:
        verdict = "identical" if losses["bitwise_identical"] else "different"
        note = "every parameter, every rank"
        if not losses["bitwise_identical"]:
            note = f"first difference of the runs: {losses['first_difference']}"
        lines.append(("parameter bits at the end", verdict, note))
    return lines


def _time_rows(found: dict) -> list[tuple[str, str, str]]:
    mine, other = found["seconds_per_step"], found["seconds_per_step_baseline"]
    if mine is None:
        return []
    note = "median of the second half of the iterations"
    if other is not None:
        note = f"{mine / other:.2f} times the baseline's {other:.3f}; {note}"
    on_cpu = [name for name in ("run", "baseline") if found[name] and found[name]["on_cpu"]]
    if on_cpu:
        note = f"{' and '.join(on_cpu)} on CPU, which says nothing about a GPU; {note}"
    return [("seconds per step", f"{mine:.3f}", note)]


def _moe_rows(moe: dict, other: dict | None) -> list[tuple[str, str, str]]:
    moved = moe["placements_moved_after"]
    since = f" after iteration {moved[-1]}" if moved else ""
    notes = {key: "" for key in _FORMS}
    for label, values in (("before experts moved", moe["before_moves"]), ("baseline", other)):
        for key, form in _FORMS.items():
            notes[key] += f"; {label} {form(values[key])}" if values else ""
    lines = []
    if moe["rows_sent"] is not None:
        saved = 1 - moe["rows_sent"] / moe["rows_stock"] if moe["rows_stock"] else 0.0
        lines.append(
            ("rows dispatched", f"{moe['rows_sent']:,}", f"{saved:.1%} less than one for each expert")
        )
    for key, what in (("rows_removed", "rows removed"), ("rank_load", "rank load, max / mean")):
        lines.append((what, _FORMS[key](moe[key]), f"mean over layers{since}{notes[key]}"))
    return lines


_FORMS = {"rows_removed": "{:.1%}".format, "rank_load": "{:.3f}".format}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _span(run: RunLog) -> str:
    return f"{run.iterations[0]} to {run.iterations[-1]}"


def _and(names) -> str:
    return " and ".join(names)
