"""Plans owners of tokens beside the main stream, from the routing of the MoE layers before.

One planner serves a pipeline chunk. The only collective is the gather of the experts that each token selected.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ciera.shuffle.layout import Layout, RowMove
from megatron_ciera.shuffle.solve import Shape, solve, unpack
from megatron_ciera.shuffle.tables import ScoreTables

# Plans timed between two readings: the first ones stand for all.
_TIMED_PLANS = 256


@dataclass(frozen=True, eq=False)
class Plan:
    """A layout (None: canonical) and the exchange towards it, once `done` has happened. sizes: on the host."""

    layout: Layout | None
    move: RowMove
    packed: torch.Tensor
    sizes: torch.Tensor
    done: "torch.cuda.Event"

    def join(self) -> tuple[list[int], list[int]]:
        """Makes the current stream wait for the plan; returns rows to and from each rank. NOTE: host sync.

        The plan was started a whole MoE layer ago, so that the host finds it done.
        """
        stream = torch.cuda.current_stream()
        stream.wait_event(self.done)
        if self.packed.is_cuda:
            # Allocated on the planner's stream, read on this one until the backward pass is through.
            self.packed.record_stream(stream)
        self.done.synchronize()
        to, from_ = self.sizes.tolist()
        return to, from_


class Planner:
    """group: the ranks among which tokens move. topk: experts that a token selects.

    On a GPU work is queued on a stream of its own; the main stream waits once, in `Plan.join`.
    """

    def __init__(self, group: dist.ProcessGroup, topk: int):
        self.group, self.topk = group, topk
        # Small kernels between large ones: they should not queue behind a whole expert.
        self.stream = torch.cuda.Stream(priority=-1)
        self._solvers: dict[tuple, Callable] = {}
        self._pool_handle = None
        self._timings: list[tuple] = []

    def beside(self, routing_map: torch.Tensor):
        """Context in which work is queued behind what made `routing_map`, and beside what follows it."""
        self.stream.wait_stream(torch.cuda.current_stream())
        if routing_map.is_cuda:
            routing_map.record_stream(self.stream)
        return torch.cuda.stream(self.stream)

    def canonical_experts(self, routing_map: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        """[T / N, E] bool of this rank's tokens -> [T, k] int64 experts of all, in canonical order. Collective."""
        experts = routing_map.to(torch.int8).topk(self.topk, dim=1).indices.to(torch.int16)
        mine = experts.view(torch.uint8)
        everyone = mine.new_empty((self.group.size() * len(mine), mine.shape[1]))
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        experts = everyone.view(torch.int16)
        return (experts if layout is None else experts[layout.place_of]).long()

    def plan(
        self,
        tables: ScoreTables | None,
        evidence: tuple[torch.Tensor, torch.Tensor] | None,
        old: Layout,
        shape: Shape,
    ) -> tuple[Plan, torch.Tensor]:
        """The next layout with the move towards it from `old`, and how many tokens spilled (int64 scalar).

        evidence: see solve.solve. Without tables the way back to canonical order. No host synchronisation.
        """
        begin, solved, done = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        previous, before = evidence or (None, None)
        packed = self._solver(tables, shape)(previous, before, old)
        solution = unpack(packed, shape)
        solved.record()
        if len(self._timings) < _TIMED_PLANS:
            self._timings.append((begin, solved))
        sizes = solution.move.sizes.to("cpu", non_blocking=True)
        done.record()
        layout = None if tables is None else solution.layout
        return Plan(layout, solution.move, packed, sizes, done), solution.spilled

    def milliseconds(self) -> list[float]:
        """Times of the first plans since the last call, on their stream. Waits for them."""
        if self._timings:
            self._timings[-1][1].synchronize()
        found = [begin.elapsed_time(end) for begin, end in self._timings]
        self._timings = []
        return found

    def settle(self) -> None:
        """Lets the current stream see everything that was counted."""
        torch.cuda.current_stream().wait_stream(self.stream)

    def forget(self) -> None:
        """Drops graphs of tables that are no longer used."""
        self._solvers = {}

    def _pool(self):
        """What graphs compute in: they replay one after another, and their results are copied out."""
        self._pool_handle = self._pool_handle or torch.cuda.graph_pool_handle()
        return self._pool_handle

    def _solver(self, tables: ScoreTables | None, shape: Shape) -> Callable:
        key = (id(tables), shape)
        if key not in self._solvers:
            self._solvers[key] = Solver(tables, shape, self._pool)
        return self._solvers[key]


class Solver:
    """`solve` for one layer's tables and one shape: as it is the first time, then replayed as a graph on a GPU.

    Some two hundred small kernels would take the host longer to launch than the device to run. On a GPU it is
    called on a stream other than the default one.
    """

    def __init__(self, tables: ScoreTables | None, shape: Shape, pool: Callable | None = None):
        self.tables, self.shape = tables, shape
        self._pool = pool or torch.cuda.graph_pool_handle
        self._calls = 0
        self._graph = self._inputs = self._output = None

    def __call__(self, previous, before, old: Layout) -> torch.Tensor:
        self._calls += 1
        if not old.token_at.is_cuda or self._calls == 1:
            return solve(self.tables, previous, before, old, self.shape)
        given = [x for x in (previous, before, old.token_at, old.place_of) if x is not None]
        if self._graph is None:
            self._capture([torch.empty_like(x).copy_(x) for x in given])
        for static, x in zip(self._inputs, given, strict=True):
            static.copy_(x)
        self._graph.replay()
        return self._output.clone()

    def _capture(self, inputs: list[torch.Tensor]) -> None:
        self._inputs = inputs
        *evidence, token_at, place_of = inputs
        previous, before = evidence or (None, None)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog and data loaders use CUDA in threads of their own.
        self._graph.capture_begin(self._pool(), capture_error_mode="thread_local")
        self._output = solve(self.tables, previous, before, Layout(token_at, place_of), self.shape)
        self._graph.capture_end()
