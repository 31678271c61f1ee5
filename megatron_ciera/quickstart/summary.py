"""What the runs of the quickstart show, as the numbers of report.json."""

import math

from megatron_ciera import observe
from megatron_ciera.quickstart.runs import Plan


def losses(plan: Plan, name: str) -> dict[int, float]:
    """Language-model loss of each iteration of a run."""
    return {
        record["iteration"]: record["losses"]["lm loss"]
        for record in observe.read_iterations(plan.observed(name))
    }


def loss_max_abs_diff(plan: Plan, first: str, second: str) -> float:
    """Largest difference of two runs' losses; both must have the same iterations.

    Raises:
        ValueError: the runs do not cover the same iterations, or a loss is not a number.
    """
    a, b = losses(plan, first), losses(plan, second)
    if a.keys() != b.keys() or not a:
        raise ValueError(
            f"runs '{first}' and '{second}' cover iterations {sorted(a)[:1]}…{sorted(a)[-1:]} and "
            f"{sorted(b)[:1]}…{sorted(b)[-1:]}; they must cover the same. Remove {plan.folder} and start anew."
        )
    worst = max(abs(a[k] - b[k]) for k in a)
    if not math.isfinite(worst):
        raise ValueError(f"a loss of run '{first}' or '{second}' is not finite")
    return worst


def parameters_identical(plan: Plan, first: str, second: str) -> bool:
    """Whether every parameter of every rank has the same bits at the end of both runs."""
    a = observe.read_parameters(plan.observed(first))
    b = observe.read_parameters(plan.observed(second))
    return bool(a) and a == b


def series(plan: Plan, name: str, key: str) -> list[float]:
    """One metric of a run per iteration (0 where it was not reported)."""
    return [observe.metric(record, key) for record in observe.read_iterations(plan.observed(name))]


def summarise(plan: Plan, fit: dict, evaluation: dict) -> dict:
    """The content of report.json; `fit` and `evaluation` are what the placement scripts print with --json."""
    raw, sent = sum(series(plan, "ciera", "ciera/bytes_raw")), sum(series(plan, "ciera", "ciera/bytes_sent"))
    return {
        "ciera": {
            "iterations": len(losses(plan, "ciera")),
            "bytes_raw": int(raw),
            "bytes_sent": int(sent),
            "ratio": sent / raw,
            "raw_fallbacks": int(sum(series(plan, "ciera", "ciera/raw_fallbacks"))),
            "loss_max_abs_diff": loss_max_abs_diff(plan, "plain", "ciera"),
            "bitwise_identical": parameters_identical(plan, "plain", "ciera"),
        },
        "placement": {
            "fit_tokens": fit["num_tokens"],
            "expert_parallel_size": fit["expert_parallel_size"],
            "rows_removed_contiguous": evaluation["rows_removed_contiguous"],
            "rows_removed_correlated": evaluation["rows_removed"],
            "rank_load_contiguous": evaluation["rank_load_contiguous"],
            "rank_load_correlated": evaluation["rank_load"],
        },
        "dispatch": {
            "rows_stock": int(sum(series(plan, "dispatch", "moe/rows_stock"))),
            "rows_sent": int(sum(series(plan, "dispatch", "moe/rows_sent"))),
            "loss_max_abs_diff": loss_max_abs_diff(plan, "plain", "dispatch"),
            # Two stock dispatchers, experts in different places: what the order of summation alone does.
            "loss_max_abs_diff_stock": loss_max_abs_diff(plan, "plain", "permuted"),
        },
    }


def problems(report: dict) -> list[str]:
    """What should hold and does not, in words; empty when all is well."""
    ciera, placement, dispatch = report["ciera"], report["placement"], report["dispatch"]
    checks = (
        (ciera["bitwise_identical"], "parameters with --ciera differ from the plain run"),
        (ciera["loss_max_abs_diff"] == 0.0, "losses with --ciera differ from the plain run"),
        (
            ciera["ratio"] < 0.75,
            f"--ciera sent {ciera['ratio']:.2f} of the plain gather's bytes, not under 0.75",
        ),
        (ciera["raw_fallbacks"] == 0, f"{ciera['raw_fallbacks']} gathers fell back to raw"),
        (
            placement["rows_removed_correlated"] > placement["rows_removed_contiguous"],
            "correlated placement removes no more rows than contiguous",
        ),
        (dispatch["rows_sent"] < dispatch["rows_stock"], "the deduplicating dispatcher removed no row"),
        (
            dispatch["loss_max_abs_diff"] <= dispatch["loss_max_abs_diff_stock"],
            "losses with the deduplicating dispatcher differ by more than two stock runs do",
        ),
    )
    return [text for holds, text in checks if not holds]
