"""Projections: every variant at every size, checked, with its split of time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ciera.cluster import Cluster
from megatron_ciera.simulator import model
from megatron_ciera.simulator.checks import check
from megatron_ciera.simulator.engine import Span, simulate
from megatron_ciera.simulator.features import ChangeRates, Features, check_shuffle, routing
from megatron_ciera.simulator.hardware import Hardware
from megatron_ciera.simulator.job import Job
from megatron_ciera.simulator.schedule import Setting, build
from megatron_ciera.simulator.split import busy, split

MAX_GPUS = 1024


@dataclass(frozen=True)
class Projection:
    """One variant at one size. Times in seconds; `gather_ratio`: bytes of the parameter gather over raw ones;
    `rows`: rows per token that dispatch sends, `rows_source`: where that is from, both None without expert
    parallelism; `memory`: bytes on a GPU, None for a replayed trace."""

    gpus: int
    features: str
    seconds: float
    split: dict[str, float]
    busy: dict[str, float]
    gather_ratio: float
    rows: float | None
    rows_source: str | None
    memory: float | None
    spans: Sequence[Span]


@dataclass(frozen=True)
class Assumptions:
    """What the simulator was told besides the config."""

    rates: ChangeRates
    rows_removed: float | None = None
    rank_load: float = 1.0


def default_sizes(job: Job) -> list[int]:
    """The config's own size, then twice that and so on up to 1,024 GPUs."""
    sizes = [job.world]
    while sizes[-1] * 2 <= MAX_GPUS:
        sizes.append(sizes[-1] * 2)
    return sizes


def default_features(job: Job, codec: bool = True, moe: bool = True) -> list[str]:
    """Each feature alone, then all that this layout allows."""
    names = ["stock", "ciera"] if codec else ["stock"]
    if moe and job.num_experts and job.expert > 1:
        names += ["dedup", "placement"]
        if job.tensor == job.expert:
            names.append("shuffle")
        if codec:
            names.append(f"ciera+{names[-1]}")
    return names


def project(
    job: Job, cluster: Cluster, gpu: Hardware, features: Features, assumed: Assumptions, gpus: int
) -> Projection:
    """Simulates one iteration of `job` on `gpus` GPUs of `cluster`.

    Raises:
        ConfigurationError: the size or the features do not fit the layout.
    """
    check_shuffle(features, job.tensor, job.expert)
    job = job.on(gpus)
    cluster = replace(cluster, nodes=-(-gpus // cluster.gpus_per_node), gpus_per_node=job.gpus_per_node)
    rows = routing(job.num_experts, job.topk, job.expert, features, assumed.rows_removed)
    ops, ports, gathers = build(Setting(job, cluster, gpu, features, assumed.rates, rows, assumed.rank_load))
    spans = simulate(ops, ports)
    check(spans, ports)
    total = max(span.end for span in spans)
    raw = sum(gather.values for gather in gathers if gather.cost.traffic)
    sent = sum(gather.values * gather.ratio for gather in gathers if gather.cost.traffic)
    return Projection(
        gpus=gpus,
        features=features.name,
        seconds=total,
        split=split(spans, total),
        busy=busy(spans),
        gather_ratio=sent / raw if raw else 1.0,
        rows=rows.rows if job.expert > 1 else None,
        rows_source=rows.source if job.expert > 1 else None,
        memory=model.memory(job, features.codec is not None).total,
        spans=spans,
    )
