"""The steps of the quickstart in order, with progress on standard error."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from megatron_ciera.quickstart import corpus, runs, summary
from megatron_ciera.quickstart.runs import Plan

FIT_TOKENS = 4096
_TRACE_TOKENS = 3 * FIT_TOKENS  # the last tokens of training: a third to fit, the rest to evaluate


@dataclass(frozen=True)
class Outcome:
    """report.json's content, what the placement evaluation printed, and the seconds that each step took."""

    report: dict
    evaluation: dict
    fit_first_token: int
    seconds: dict[str, float]


def run(plan: Plan) -> Outcome:
    """Runs everything and returns what was measured. Raises RuntimeError if a run or a script fails."""
    seconds = {}
    print("1/4 dataset: the Python standard library's sources, one token a byte", file=sys.stderr)
    dataset = plan.folder / "dataset" / "stdlib"
    num_tokens = corpus.write_dataset(dataset)
    print(f"    {num_tokens:,} tokens in {dataset}.bin", file=sys.stderr)
    shared = runs.model_flags(plan, dataset)

    print(f"2/4 train {plan.train_iterations} iterations on {runs.PROCESSES} processes", file=sys.stderr)
    train_flags = [
        *shared,
        *("--train-iters", str(plan.train_iterations)),
        *("--save", str(plan.checkpoint)),
        *("--moe-routing-trace-path", str(plan.trace)),
    ]
    seconds["train"] = _train(plan, "train", train_flags, plan.train_iterations)

    print(f"3/4 fit a placement from {FIT_TOKENS} tokens", file=sys.stderr)
    first = max(0, plan.train_iterations * runs.GLOBAL_BATCH * runs.SEQUENCE - _TRACE_TOKENS)
    fit, evaluation = _placement(plan, first)
    seconds["fit"] = fit["seconds"]

    print(f"4/4 resume {plan.resume_iterations} iterations four ways", file=sys.stderr)
    resumed = [
        *shared,
        *("--train-iters", str(plan.last_iteration)),
        *("--load", str(plan.checkpoint)),
        # Weight decay has a schedule too, whose length follows --train-iters.
        "--override-opt-param-scheduler",
    ]
    ciera = ["--ciera", "--ciera-warmup-iters", "2"]
    placed = ["--correlated-placement", "--placement-file", str(plan.placement)]
    ways = {
        "plain": [],
        "ciera": ciera,
        "dispatch": [*ciera, *placed],
        "permuted": [*placed, "--no-dedup-dispatch"],
    }
    for name, flags in ways.items():
        seconds[name] = _train(plan, name, [*resumed, *flags], plan.resume_iterations)
    return Outcome(summary.summarise(plan, fit, evaluation), evaluation, first, seconds)


def _train(plan: Plan, name: str, flags: list[str], iterations: int) -> float:
    with tqdm(total=iterations, desc=f"    {name:9}", unit="it", file=sys.stderr) as bar:
        return runs.train(plan, name, flags, lambda done: bar.update(done - bar.n) if done > bar.n else None)


def _placement(plan: Plan, first: int) -> tuple[dict, dict]:
    fit = _script(
        "fit_placement.py",
        plan.trace,
        *("--expert-parallel-size", runs.EXPERT_PARALLEL),
        *("--skip-tokens", first),
        *("--num-tokens", FIT_TOKENS),
        *("--output", plan.placement),
        *("--report", plan.folder / "placement.html"),
    )
    evaluation = _script(
        "evaluate_placement.py",
        *(plan.placement, plan.trace),
        *("--skip-tokens", first + FIT_TOKENS),
        *("--num-tokens", _TRACE_TOKENS - FIT_TOKENS),
    )
    return fit, evaluation


def _script(name: str, *words) -> dict:
    command = [sys.executable, str(Path("scripts") / name), *map(str, words), "--json"]
    print("    " + " ".join(command[1:]), file=sys.stderr)
    result = subprocess.run(command, cwd=runs.ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise RuntimeError(f"scripts/{name} failed with exit code {result.returncode}; its message is above")
    return json.loads(result.stdout)
