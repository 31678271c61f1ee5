"""Which layers of a pipeline chunk shuffle, and behind which router each of their plans is made. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Made behind a router: the layout that layer `target` leaves its attention in.

    evidence: the MoE layers one and two before, whose routing predicts `target`; None: back to canonical order.
    Numbers count the layers of the chunk.
    """

    target: int
    evidence: tuple[int, int] | None


def plan_jobs(is_moe: Sequence[bool], predicted: Sequence[bool]) -> dict[int, Job]:
    """Layer whose router starts it -> job.

    predicted: whether there are tables for a layer. A layer shuffles if it is MoE, predicted, and behind two MoE
    layers of the same chunk. The last layer goes back to canonical order, which is what the next stage, the final
    norm and MTP expect: its experts may win less than an exchange behind it would cost. Layers in between stay in
    the layout that they find.
    """
    moe = [layer for layer, is_one in enumerate(is_moe) if is_one]
    last = len(is_moe) - 1
    jobs = {}
    for two_before, before, target in zip(moe, moe[1:], moe[2:], strict=False):
        if predicted[target] and target != last:
            jobs[before] = Job(target, (before, two_before))
    if jobs:
        jobs[max(layer for layer in moe if layer != last)] = Job(last, None)
    return jobs
