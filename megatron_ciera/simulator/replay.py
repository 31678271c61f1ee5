"""A recorded iteration played again: computation as recorded, collectives as recorded or on another cluster."""

from dataclasses import dataclass, replace

from megatron_ciera.cluster import Cluster
from megatron_ciera.errors import refuse
from megatron_ciera.simulator.checks import check
from megatron_ciera.simulator.engine import Op, simulate
from megatron_ciera.simulator.features import ChangeRates, Features, check_shuffle, routing
from megatron_ciera.simulator.gather import plan_gather
from megatron_ciera.simulator.hardware import Hardware
from megatron_ciera.simulator.network import Cost, Group, all_to_all, links, ring, strided
from megatron_ciera.simulator.project import Projection
from megatron_ciera.simulator.split import busy, split
from megatron_ciera.simulator.trace import Collective, Iteration, Trace

RECORDED = Features("recorded")


@dataclass(frozen=True)
class Target:
    """Where and how to play a trace. `rows_removed`: by placement, if it is known."""

    cluster: Cluster
    gpu: Hardware
    features: Features
    rates: ChangeRates
    gpus: int
    rows_removed: float | None = None


def replay_as_recorded(trace: Trace) -> float:
    """Seconds of the typical iteration with every collective as long as it was: the recorded time again."""
    iteration = trace.typical()
    player = _Player(iteration, lambda call: (Cost(call.end - call.start), None), queued=False)
    return max(span.end for span in simulate(player.ops, {"intra": 1.0, "inter": 1.0}))


def replay(trace: Trace, target: Target) -> Projection:
    """The typical iteration on `target`.

    Raises:
        ConfigurationError: a feature is in the trace already, or the size does not fit the recorded layout.
    """
    _check(trace, target)
    iteration = trace.typical()
    world = _World(trace, target)
    player = _Player(iteration, world.cost)
    ports = links(target.cluster)
    spans = simulate(player.ops, ports)
    check(spans, ports)
    total = max(span.end for span in spans)
    return Projection(
        gpus=target.gpus,
        features=target.features.name,
        seconds=total,
        split=split(spans, total, ""),
        busy=busy(spans, ""),
        gather_ratio=world.sent / world.raw if world.raw else 1.0,
        rows=world.rows,
        rows_source=world.rows_source,
        memory=None,
        spans=spans,
    )


def _check(trace: Trace, target: Target) -> None:
    wanted = {"ciera": target.features.codec, "dedup": target.features.dedup}
    for name, value in wanted.items():
        if value and name in trace.header["features"]:
            raise refuse(
                "--features",
                f"{target.features.name} on a trace recorded with --{name}",
                "a trace without it",
                "Record the run without our other flags.",
            )
    settings = trace.header["settings"]
    if target.features.codec and not trace.gathers_bf16:
        raise refuse(
            "--features",
            f"{target.features.name} on a trace of a run that gathers parameters in another precision than bf16",
            "a trace in bf16: the codecs' sizes and speeds are of bf16",
            "Leave the codec out (--features recorded,dedup), or record a run in bf16.",
        )
    check_shuffle(
        target.features, settings["tensor_model_parallel_size"], settings["expert_model_parallel_size"]
    )
    world = trace.header["world"]
    if target.gpus % world and world % target.gpus:
        raise refuse(
            "--gpus", target.gpus, f"a multiple or a divisor of {world}, the recorded size", "Change it."
        )


class _World:
    """Prices recorded collectives on the target."""

    def __init__(self, trace: Trace, target: Target):
        self.target = target
        self.settings = trace.header["settings"]
        self.scale = target.gpus / trace.header["world"]
        self.recorded_world = trace.header["world"]
        self.raw = self.sent = 0.0
        ranks = self.settings["expert_model_parallel_size"]
        experts, topk = self.settings["num_experts"] or 0, self.settings["moe_router_topk"]
        self.rows, self.rows_source, self.row_factor = None, None, 1.0
        if experts and ranks > 1:
            before = _recorded_features(trace)
            now = target.features if target.features.dedup else before
            old, new = (routing(experts, topk, ranks, each, target.rows_removed) for each in (before, now))
            self.rows, self.rows_source, self.row_factor = new.rows, new.source, new.remote / old.remote

    def cost(self, call: Collective):
        """(network cost, planned gather or None) of one collective."""
        group = self._group(call)
        cluster = self.target.cluster
        if call.kind == "all_to_all":
            leaving = call.num_bytes * (1 - 1 / call.size)
            leaving *= self.row_factor if call.role == "expert" else 1.0
            return all_to_all(cluster, group, leaving), None
        if call.kind == "all_gather" and call.role in ("data", "expert data"):
            kind = "expert" if call.role == "expert data" else "dense"
            gather = plan_gather(
                kind,
                call.num_bytes // 2,
                group,
                cluster,
                self.target.gpu,
                self.target.features,
                self.target.rates,
            )
            self.raw += call.num_bytes
            self.sent += call.num_bytes * gather.ratio
            return gather.cost, gather
        reduces = call.kind in ("all_reduce", "reduce_scatter", "reduce")
        return ring(cluster, group, call.num_bytes, 2 if call.kind == "all_reduce" else 1, reduces), None

    def _group(self, call: Collective) -> Group:
        size, stride = call.size, 1
        if call.role in ("data", "expert data") or call.size == self.recorded_world:
            size = max(1, round(call.size * self.scale))
        if call.role == "data":
            stride = self.settings["tensor_model_parallel_size"]
        if call.role == "expert data":
            stride = self.settings["expert_model_parallel_size"]
        return strided(size, stride, self.target.cluster.gpus_per_node)


class _Player:
    """Turns an iteration into operations; `cost(call)` prices its collectives.

    queued: those of one group run one after another, as NCCL runs them; else each when it is issued.
    """

    def __init__(self, iteration: Iteration, cost, queued: bool = True):
        self._queued = queued
        self.ops: list[Op] = []
        self.last: tuple[str, ...] = ()
        done: dict[int, str] = {}
        calls = _clamped(iteration)
        for number, step in enumerate(iteration.steps):
            if step.what == "compute":
                self._compute(f"{number}.compute", step.seconds)
            elif step.what == "launch":
                call = calls[step.call]
                price, gather = cost(call)
                done[step.call] = self._launch(step.call, call, price, gather)
            elif step.call in done:
                # What the host needed to notice that the collective had ended stays as recorded.
                late = step.end - max(step.begin, min(step.end, calls[step.call].end))
                self._compute(f"{number}.resume", late, (done[step.call],))

    def _compute(self, key: str, seconds: float, after: tuple[str, ...] = ()) -> None:
        self.ops.append(Op(key, "compute", "compute", seconds, {}, (*self.last, *after)))
        self.last = (key,)

    def _launch(self, number: int, call: Collective, price: Cost, gather) -> str:
        key, after = f"{number}.{call.kind}", self.last
        stream = f"group {call.role}" if self._queued else key
        if gather is None or not gather.coded:
            self.ops.append(Op(key, _kind(call), stream, price.seconds, price.traffic, after))
            return key
        for piece in range(gather.pieces):
            sent, name = f"{key}.{piece}", f"{number}.{piece}"
            self.ops.append(Op(f"{name}.encode", "codec", "encode", gather.encode, {}, after))
            self.ops.append(Op(sent, _kind(call), stream, price.seconds, price.traffic, (f"{name}.encode",)))
            self.ops.append(Op(f"{name}.decode", "codec", "decode", gather.decode, {}, (sent,)))
        return f"{name}.decode"


def _clamped(iteration: Iteration) -> dict[int, Collective]:
    """Ends no later than when somebody had waited for them: a callback may be told late."""
    calls = dict(iteration.calls)
    for step in iteration.steps:
        if step.what == "wait" and step.call in calls:
            call = calls[step.call]
            calls[step.call] = replace(call, end=max(call.start, min(call.end, step.end)))
    return calls


def _kind(call: Collective) -> str:
    if call.kind == "all_to_all":
        return "all_to_all"
    if call.role == "tensor":
        return "tensor"
    if call.role in ("data", "expert data"):
        return "param_gather" if call.kind == "all_gather" else "grad_reduce"
    return "other"


def _recorded_features(trace: Trace) -> Features:
    on = set(trace.header["features"])
    return replace(RECORDED, dedup="dedup" in on, placement="placement" in on and "dedup" in on)
