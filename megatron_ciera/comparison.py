"""Two runs of one training command compared: every loss, every gradient norm, the bits of every final parameter."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_ciera import observe


@dataclass(frozen=True)
class Difference:
    """How far two observed runs are apart; all zero and True if nothing differs in any bit.

    `loss_max_abs_diff` is over all losses that Megatron logs. NaN in both runs at one place counts as equal.
    """

    iterations: int
    loss_max_abs_diff: float
    grad_norm_max_abs_diff: float
    bitwise_identical: bool
    parameters: int
    first_difference: str | None

    @property
    def equal(self) -> bool:
        return self.first_difference is None

    def as_dict(self) -> dict:
        return asdict(self) | {"equal": self.equal}


def compare(first: Path, second: Path) -> Difference:
    """The difference of two folders that MEGATRON_CIERA_OBSERVE named.

    Raises:
        ValueError: a run has no iterations, or the two do not cover the same.
    """
    a, b = observe.read_iterations(first), observe.read_iterations(second)
    if not a or [r["iteration"] for r in a] != [r["iteration"] for r in b]:
        raise ValueError(
            f"the runs logged {len(a)} and {len(b)} iterations; they must cover the same, with --log-interval 1"
        )
    found: list[str] = []
    losses, norms = 0.0, 0.0
    for x, y in zip(a, b, strict=True):
        place = f"iteration {x['iteration']}"
        if x["losses"].keys() != y["losses"].keys():
            raise ValueError(
                f"{place}: different losses are logged: {sorted(x['losses'])}, {sorted(y['losses'])}"
            )
        for name in x["losses"]:
            losses = max(losses, _apart(x["losses"][name], y["losses"][name], f"{place}, {name}", found))
        norms = max(norms, _apart(x["grad_norm"], y["grad_norm"], f"{place}, gradient norm", found))
    left, right = observe.read_parameters(first), observe.read_parameters(second)
    identical = bool(left) and left == right
    if not identical:
        found.append(_first_parameter(left, right))
    return Difference(
        len(a), losses, norms, identical, sum(map(len, left.values())), found[0] if found else None
    )


def effects(first: Path, second: Path, flags: Sequence[str]) -> dict[str, dict[str, str]]:
    """As "effect": flags of the second observed run and what they did; "without_effect": those that did nothing, why.

    Flags of both runs are not what is compared, unless they are among `flags`.
    """
    a, b = (observe.read_iterations(path)[-1] for path in (first, second))
    return {
        kind: {
            flag: text
            for flag, text in b.get(kind, {}).items()
            if flag not in a.get(kind, {}) or any(word.startswith(flag) for word in flags)
        }
        for kind in ("effect", "without_effect")
    }


def _apart(x, y, place: str, found: list[str]) -> float:
    if x == y or (x != x and y != y):
        return 0.0
    found.append(f"{place}: {x!r} and {y!r}")
    return abs(x - y) if x is not None and y is not None and x == x and y == y else float("inf")


def _first_parameter(left: dict, right: dict) -> str:
    if left.keys() != right.keys() or not left:
        return f"final parameters: digests of {len(left)} and {len(right)} ranks"
    for rank in left:
        for name, digest in left[rank].items():
            if right[rank].get(name) != digest:
                return f"final parameters: {rank.removesuffix('.json').removeprefix('parameters_')}, {name}"
    return "final parameters: the second run has more"


def observe_run(command: Sequence[str], folder: Path, log: Path) -> int:
    """Runs a training command observed in `folder`, everything it prints in `log`; returns its exit code."""
    observe.clear(folder)
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {observe.VARIABLE: str(folder)}
    with open(log, "w") as output:
        return subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
