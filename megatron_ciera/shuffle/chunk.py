"""The layers of one pipeline chunk during a forward pass: which layout they are in, and what is planned next."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ciera.shuffle.counters import ShuffleCounter
from megatron_ciera.shuffle.fit import RoutingRecorder
from megatron_ciera.shuffle.jobs import Job, plan_jobs
from megatron_ciera.shuffle.layout import Layout, canonical
from megatron_ciera.shuffle.planner import Plan, Planner
from megatron_ciera.shuffle.rows import RowExchange
from megatron_ciera.shuffle.solve import Shape
from megatron_ciera.shuffle.tables import ScoreTables


@dataclass(frozen=True, eq=False)
class Passage:
    """One micro-batch's way through one layer: the layouts it comes and leaves in (None: canonical).

    exchange: of the residual's rows, None when the layout stays.
    """

    comes: Layout | None = None
    leaves: Layout | None = None
    exchange: RowExchange | None = None


CANONICAL = Passage()


class ChunkShuffle:
    """State of a chunk. Layers are counted from 0 inside the chunk; `enter` is called for each in order.

    A pass starts canonical and ends canonical. With activation recomputation the first pass keeps its passages,
    and the second takes them back in the same order: it plans nothing.
    """

    def __init__(self, is_moe: list[bool], group: dist.ProcessGroup, topk: int, device):
        self.is_moe, self.group, self.device = is_moe, group, device
        self.planner = Planner(group, topk)
        self.counters = [ShuffleCounter(device) for _ in is_moe]
        self.expert_to_rank: list[torch.Tensor | None] = [None] * len(is_moe)
        self.tables: list[ScoreTables | None] = [None] * len(is_moe)
        self.paused = False
        self.recorder: RoutingRecorder | None = None
        self._host_waits: list[float] = [0.0, 0]
        self._jobs: dict[int, Job] = {}
        self._kept: list[deque[Passage]] = [deque() for _ in is_moe]
        self._start_pass()

    def install(self, tables: Mapping[int, ScoreTables], expert_to_rank: Mapping[int, torch.Tensor]) -> None:
        """Takes tables (layer -> ) and the rank of each expert ([E] int64) of the MoE layers. Between steps."""
        self.planner.forget()
        self.tables = [tables.get(layer) for layer in range(len(self.is_moe))]
        self.expert_to_rank = [expert_to_rank.get(layer) for layer in range(len(self.is_moe))]
        self._jobs = plan_jobs(self.is_moe, [layer is not None for layer in self.tables])

    def forget_passages(self) -> None:
        """Between steps: passages whose backward pass never came (an aborted iteration)."""
        for kept in self._kept:
            kept.clear()

    def enter(self, layer: int) -> Passage:
        """The passage through `layer`, whose plan is joined here. NOTE: host sync where a plan is due."""
        if recomputing():
            return self._kept[layer].popleft()
        if layer == 0:
            self._start_pass()
        passage = self._next_passage(layer)
        self._layout = passage.leaves
        if not torch.is_grad_enabled():
            self._kept[layer].append(passage)
        return passage

    def routed(self, layer: int, routing_map: torch.Tensor, columns: int) -> None:
        """Behind the router of `layer`: [T / N, E] bool of this rank's tokens, [s / N, b] flat."""
        if recomputing():
            return
        job = self._jobs_now.get(layer)
        if layer not in self._watched and job is None and self.recorder is None:
            return
        with self.planner.beside(routing_map), torch.no_grad():
            self._observe(layer, routing_map, columns, job)

    def take_host_waits(self) -> list[float]:
        """[seconds, plans]: how long the host waited for how many plans since the last call."""
        waited, self._host_waits = self._host_waits, [0.0, 0]
        return waited

    def _start_pass(self) -> None:
        self._jobs_now = {} if self.paused else self._jobs
        jobs = [job for job in self._jobs_now.values() if job.evidence is not None]
        self._targets = {job.target for job in jobs}
        self._watched = self._targets | {layer for job in jobs for layer in job.evidence}
        self._layout: Layout | None = None
        self._pending: tuple[int, Plan] | None = None
        self._experts: dict[int, torch.Tensor] = {}

    def _next_passage(self, layer: int) -> Passage:
        if self._pending is None or self._pending[0] != layer:
            return Passage(self._layout, self._layout)
        _, plan = self._pending
        self._pending = None
        started = time.perf_counter()
        to, from_ = plan.join()
        self._host_waits[0] += time.perf_counter() - started
        self._host_waits[1] += 1
        return Passage(self._layout, plan.layout, RowExchange(plan.move, to, from_, self.group))

    def _observe(self, layer: int, routing_map: torch.Tensor, columns: int, job: Job | None) -> None:
        shape = Shape(len(routing_map) * self.group.size(), columns, self.group.size(), self.group.rank())
        if layer in self._watched or self.recorder is not None:
            self._experts[layer] = self.planner.canonical_experts(routing_map, self._layout)
        if self.recorder is not None:
            self.recorder.add(layer, self._experts[layer])
        if layer in self._targets:
            self._count(layer, shape)
        if job is not None:
            self._plan(job, shape)

    def _count(self, layer: int, shape: Shape) -> None:
        share = shape.rank * shape.shard, (shape.rank + 1) * shape.shard
        owner = self._layout.place_of // shape.shard
        self.counters[layer].add_routing(self._experts[layer], self.expert_to_rank[layer], owner, share)

    def _plan(self, job: Job, shape: Shape) -> None:
        evidence = tables = None
        if job.evidence is not None:
            evidence = tuple(self._experts[layer] for layer in job.evidence)
            tables = self.tables[job.target]
        elif self._layout is None:
            return
        old = self._layout or canonical(shape.num_tokens, self.device)
        plan, spilled = self.planner.plan(tables, evidence, old, shape)
        counter = self.counters[job.target]
        counter.add_moved(plan.move.sizes[0], shape.rank)
        if tables is not None:
            counter.add_spill(spilled, shape.num_tokens, shape.rank)
        self._pending = job.target, plan


def recomputing() -> bool:
    """Whether this is the second forward pass of a checkpointed part of the model."""
    from megatron.core.tensor_parallel.random import is_checkpointing

    return is_checkpointing() and torch.is_grad_enabled()
