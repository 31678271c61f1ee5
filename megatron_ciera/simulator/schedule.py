"""One training iteration of a config as operations on streams: forward, backward, reduction, optimizer, gather.

All ranks of a pipeline stage do the same, so one GPU stands for the stage and a simulation costs the same for 8 and
for 1,024 GPUs. An iteration starts with the gather of what the optimizer before it wrote, as Megatron's overlapped
gather does; without overlap the same gather stands there in one piece.
"""

from dataclasses import dataclass

from megatron_ciera.cluster import Cluster
from megatron_ciera.simulator import model
from megatron_ciera.simulator.engine import Op
from megatron_ciera.simulator.features import ChangeRates, Features, Routing
from megatron_ciera.simulator.gather import SIZE_BYTES, Gather, plan_gather
from megatron_ciera.simulator.hardware import Hardware
from megatron_ciera.simulator.job import Job
from megatron_ciera.simulator.network import Cost, all_to_all, links, point_to_point, ring

_ASSIGNMENT_BYTES = 4


@dataclass(frozen=True)
class Setting:
    """Everything that decides the timeline of one variant at one size."""

    job: Job
    cluster: Cluster
    gpu: Hardware
    features: Features
    rates: ChangeRates
    routing: Routing
    rank_load: float = 1.0


def build(setting: Setting) -> tuple[list[Op], dict[str, float], list[Gather]]:
    """Operations of all stages, the bandwidth of their links, and the gathers of the first stage."""
    ops, ports, gathers = [], {}, []
    for stage in range(setting.job.pipeline):
        built = _Stage(setting, stage)
        ops += built.ops
        gathers = gathers or list(built.gathers.values())
        ports.update({f"s{stage}.{link}": rate for link, rate in links(setting.cluster).items()})
    return ops, ports, gathers


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """("F" | "B", micro-batch) in the order in which `stage` runs them."""
    warm_up = min(stages - stage - 1, micro_batches)
    order = [("F", i) for i in range(warm_up)]
    for i in range(micro_batches - warm_up):
        order += [("F", warm_up + i), ("B", i)]
    return order + [("B", i) for i in range(micro_batches - warm_up, micro_batches)]


class _Stage:
    """Builds the operations of one pipeline stage, in issue order of each stream."""

    def __init__(self, setting: Setting, stage: int):
        self.setting, self.stage = setting, stage
        self.job, self.gpu = setting.job, setting.gpu
        self.groups = self.job.groups()
        self.layers = model.stage_layers(self.job, stage)
        self.times = {
            layer: model.layer_times(self.job, layer, self.gpu, setting.rank_load) for layer in self.layers
        }
        self.ops: list[Op] = []
        self.last: str | None = None  # the operation that the next one on the critical chain follows
        self.reduced: list[str] = []
        self.gathers = self._plan_gathers()
        self._gather_all()
        for what, micro_batch in one_forward_one_backward(stage, self.job.pipeline, self.job.micro_batches):
            self._forward(micro_batch) if what == "F" else self._backward(micro_batch)
        self._reduce_and_step()

    # Operations.

    def _add(self, name: str, kind: str, stream: str, seconds: float, traffic=None, after=()) -> str:
        prefix = f"s{self.stage}."
        self.ops.append(
            Op(
                prefix + name,
                kind,
                prefix + stream,
                seconds,
                {prefix + link: amount for link, amount in (traffic or {}).items()},
                tuple(after),
            )
        )
        return prefix + name

    def _chain(self, name: str, kind: str, stream: str, seconds: float, traffic=None, after=()) -> None:
        before = (self.last,) if self.last else ()
        self.last = self._add(name, kind, stream, seconds, traffic, (*before, *after))

    def _compute(self, name: str, seconds: float, after=()) -> None:
        self._chain(name, "compute", "compute", seconds, None, after)

    def _send(self, name: str, kind: str, stream: str, cost: Cost) -> None:
        self._chain(name, kind, stream, cost.seconds, cost.traffic)

    # The parameter gather.

    def _buckets(self) -> dict[str, tuple[str, int]]:
        """Name: (kind, values). A bucket a layer and kind with overlap, else one of each kind."""
        found = {}
        for layer in self.layers:
            held = model.layer_parameters(self.job, layer)
            found[f"l{layer}.dense"] = ("dense", held.dense)
            if held.expert:
                found[f"l{layer}.expert"] = ("expert", held.expert)
        held = model.stage_parameters(self.job, self.stage)
        outside = held.dense - sum(values for kind, values in found.values() if kind == "dense")
        first = f"l{self.layers[0]}.dense"
        found[first] = ("dense", found[first][1] + outside)
        return found

    def _plan_gathers(self) -> dict[str, Gather]:
        buckets = self._buckets()
        if not self.job.overlap_param_gather:
            totals = {}
            for kind, values in buckets.values():
                totals[kind] = totals.get(kind, 0) + values
            buckets = {kind: (kind, values) for kind, values in totals.items()}
        group = {"dense": self.groups["data"], "expert": self.groups["expert data"]}
        setting = self.setting
        return {
            name: plan_gather(
                kind, values, group[kind], setting.cluster, self.gpu, setting.features, setting.rates
            )
            for name, (kind, values) in buckets.items()
        }

    def _gather_all(self) -> None:
        """Encodes, piece after piece; without overlap also gathers everything before the first layer."""
        self.ready: dict[str, str] = {}
        self.exchanged: dict[str, str] = {}
        stream = "encode" if self.setting.features.overlap else "compute"
        for name, gather in self.gathers.items():
            for piece in range(gather.pieces if gather.coded else 0):
                encoded = self._add(f"encode.{name}.{piece}", "codec", stream, gather.encode)
                sizes = self._sizes(gather)
                self.exchanged[f"{name}.{piece}"] = self._add(
                    f"sizes.{name}.{piece}", "param_gather", "sizes", sizes.seconds, sizes.traffic, (encoded,)
                )
        if not self.job.overlap_param_gather:
            for name in self.gathers:
                self._gather(name, ())
            for name in self.gathers:
                self._await(name)

    def _sizes(self, gather: Gather) -> Cost:
        group = self.groups["data" if gather.kind == "dense" else "expert data"]
        return ring(self.setting.cluster, group, SIZE_BYTES * group.size)

    def _gather(self, name: str, after: tuple[str, ...]) -> None:
        gather = self.gathers[name]
        if gather.cost == Cost():
            return
        for piece in range(gather.pieces):
            label = f"{name}.{piece}" if gather.coded else name
            self.ready[name] = sent = self._add(
                f"gather.{label}",
                "param_gather",
                f"gather {gather.kind}",
                gather.cost.seconds,
                gather.cost.traffic,
                (*after, self.exchanged[label]) if gather.coded else after,
            )
            if gather.coded and self.setting.features.overlap:
                self.ready[name] = self._add(
                    f"decode.{label}", "codec", "decode", gather.decode, None, (sent,)
                )

    def _await(self, name: str) -> None:
        """The critical chain waits for a bucket; without codec overlap it decodes it."""
        if name not in self.ready:
            return
        gather, ready = self.gathers[name], self.ready.pop(name)
        if gather.coded and not self.setting.features.overlap:
            decode = gather.decode * gather.pieces
            self._chain(f"decode.{name}", "codec", "compute", decode, None, (ready,))
        else:
            self._compute(f"ready.{name}", 0.0, (ready,))

    def _prefetch(self, layer: int) -> None:
        """Megatron dispatches a bucket's gather when the forward pass reaches the bucket before it."""
        after = (self.last,) if self.last else ()
        for kind in ("dense", "expert"):
            if f"l{layer}.{kind}" in self.gathers:
                self._gather(f"l{layer}.{kind}", after)

    # Passes.

    def _forward(self, micro_batch: int) -> None:
        tag = f"f{micro_batch}"
        if self.stage > 0:
            self._compute(f"{tag}.receive", 0.0, (f"s{self.stage - 1}.f{micro_batch}.send",))
        gathers = micro_batch == 0 and self.job.overlap_param_gather
        if gathers:
            self._prefetch(self.layers[0])
        for layer in self.layers:
            if gathers:
                self._await(f"l{layer}.dense")
                if layer + 1 in self.layers:
                    self._prefetch(layer + 1)
            self._layer_forward(f"{tag}.l{layer}", layer, gathers)
        if self.stage == self.job.pipeline - 1:
            self._compute(f"{tag}.output", model.output_time(self.job, self.gpu))
        else:
            self._to_neighbour(f"{tag}.send")

    def _layer_forward(self, tag: str, layer: int, gathers: bool = False) -> None:
        times, moe = self.times[layer], self.job.is_moe[layer]
        self._tensor(f"{tag}.gather_tokens")
        self._compute(f"{tag}.attention", times.attention)
        self._tensor(f"{tag}.scatter_tokens")
        if gathers:
            self._await(f"l{layer}.expert")
        if moe:
            if self.job.shared_ffn:
                self._tensor(f"{tag}.gather_shared")
            self._compute(f"{tag}.router", times.router)
            if self.job.shared_ffn:
                self._tensor(f"{tag}.scatter_shared")
            self._exchange(f"{tag}.dispatch")
            self._compute(f"{tag}.experts", times.experts)
            self._exchange(f"{tag}.combine")
        else:
            self._tensor(f"{tag}.gather_ffn")
            self._compute(f"{tag}.ffn", times.experts)
            self._tensor(f"{tag}.scatter_ffn")

    def _backward(self, micro_batch: int) -> None:
        """Twice the arithmetic and the same communication as forward, which full recompute runs once more."""
        tag = f"b{micro_batch}"
        if self.stage < self.job.pipeline - 1:
            self._compute(f"{tag}.receive", 0.0, (f"s{self.stage + 1}.b{micro_batch}.send",))
        else:
            self._compute(f"{tag}.output", 2 * model.output_time(self.job, self.gpu))
        for layer in reversed(self.layers):
            if self.job.recompute:
                self._layer_forward(f"{tag}.again.l{layer}", layer)
            self._layer_backward(f"{tag}.l{layer}", layer)
            if micro_batch == self.job.micro_batches - 1 and self.job.overlap_grad_reduce:
                held = model.layer_parameters(self.job, layer)
                self._reduce(f"l{layer}", held.dense, held.expert)
        if self.stage > 0:
            self._to_neighbour(f"{tag}.send")

    def _layer_backward(self, tag: str, layer: int) -> None:
        times, moe = self.times[layer], self.job.is_moe[layer]
        if moe:
            self._exchange(f"{tag}.combine")
            self._compute(f"{tag}.experts", 2 * times.experts)
            self._exchange(f"{tag}.dispatch")
            if self.job.shared_ffn:
                self._tensor(f"{tag}.gather_shared")
            self._compute(f"{tag}.router", 2 * times.router)
            if self.job.shared_ffn:
                self._tensor(f"{tag}.scatter_shared")
        else:
            self._tensor(f"{tag}.gather_ffn")
            self._compute(f"{tag}.ffn", 2 * times.experts)
            self._tensor(f"{tag}.scatter_ffn")
        self._tensor(f"{tag}.gather_tokens")
        self._compute(f"{tag}.attention", 2 * times.attention)
        self._tensor(f"{tag}.scatter_tokens")

    def _tensor(self, name: str) -> None:
        """All-gather or reduce-scatter of the tokens of a tensor-parallel group."""
        if self.job.tensor > 1:
            moved = 2.0 * self.job.micro_batch * self.job.sequence * self.job.hidden
            self._send(name, "tensor", "tensor", ring(self.setting.cluster, self.groups["tensor"], moved))

    def _exchange(self, name: str) -> None:
        """One all-to-all of rows; probabilities go with those that carry assignments."""
        if self.job.expert == 1:
            return
        per_token = 2 * self.job.hidden * self.setting.routing.remote
        per_token += _ASSIGNMENT_BYTES * self.job.topk * (1 - 1 / self.job.expert)
        moved = self.job.tokens * per_token * self.setting.rank_load
        cost = all_to_all(self.setting.cluster, self.groups["expert"], moved)
        self._send(name, "all_to_all", "expert", cost)

    def _to_neighbour(self, name: str) -> None:
        moved = 2.0 * self.job.tokens * self.job.hidden
        same_node = self.job.world <= self.job.gpus_per_node
        cost = point_to_point(self.setting.cluster, same_node, moved)
        before = (self.last,) if self.last else ()
        self._add(name, "pipeline", "pipeline", cost.seconds, cost.traffic, before)

    # After the last backward.

    def _reduce(self, name: str, dense: int, expert: int) -> None:
        after = (self.last,) if self.last else ()
        for kind, values, group in (("dense", dense, "data"), ("expert", expert, "expert data")):
            reduced = float(self.job.grad_bytes * values)
            cost = ring(self.setting.cluster, self.groups[group], reduced, reduces=True)
            if cost != Cost():
                stream = f"reduce {kind}"
                self.reduced.append(
                    self._add(
                        f"reduce.{name}.{kind}", "grad_reduce", stream, cost.seconds, cost.traffic, after
                    )
                )

    def _reduce_and_step(self) -> None:
        held = model.stage_parameters(self.job, self.stage)
        if self.job.overlap_grad_reduce:
            layers = [model.layer_parameters(self.job, layer).dense for layer in self.layers]
            self._reduce("embedding", held.dense - sum(layers), 0)
        else:
            self._reduce("all", held.dense, held.expert)
        self._compute("reduced", 0.0, self.reduced)
        self._compute("optimizer", model.optimizer_time(self.job, self.stage, self.gpu))
