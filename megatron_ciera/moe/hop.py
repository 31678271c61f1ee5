"""One hop of the dispatch: rows to the ranks of one process group, and back. Knows nothing of Megatron."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_ciera.moe import plan as planning
from megatron_ciera.moe.exchange import exchange_assignments, exchange_rows
from megatron_ciera.moe.rows import expand, pick, reduce


@dataclass(frozen=True)
class HopState:
    """What a hop must remember until its rows come back. Splits are on the host, the rest on the device.

    counts: [ranks, n + 2] as plan.Counts has it, on the device for metrics. tokens_per_expert: [n] int64 on the
    host, over all sources.
    """

    send: planning.SendPlan
    counts: torch.Tensor
    rows_sent: list[int]
    rows_received: list[int]
    assignments_sent: list[int]
    assignments_received: list[int]
    tokens_per_expert: torch.Tensor
    tags_received: torch.Tensor | None = None


@dataclass(frozen=True)
class Hop:
    """The ranks of `group`, each holding an equal share of the experts; at most `topk` experts a token."""

    group: dist.ProcessGroup
    topk: int

    @property
    def size(self) -> int:
        return self.group.size()

    def plan(self, routing_map: torch.Tensor) -> HopState:
        """[T, E] bool -> what goes where. Collective.

        NOTE: one device-to-host sync, awaited behind the launches of the plan.
        """
        counts = planning.count(routing_map, self.size)
        everyone = counts.table.new_empty((self.size * self.size, counts.table.shape[1]))
        dist.all_gather_into_tensor(everyone, counts.table, group=self.group)
        sizes = everyone.to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
        send = planning.plan_send(routing_map, self.size, self.topk, counts)
        copied.synchronize()
        # In numpy: on the host a torch operation costs many times as much.
        sizes, me = sizes.numpy().reshape(self.size, self.size, -1), self.group.rank()
        sent, received = sizes[me], sizes[:, me]
        rows_sent, assignments_sent = sent[:, 0].tolist(), sent[:, -1].tolist()
        return HopState(
            send=send.cut_to(sum(rows_sent), sum(assignments_sent)),
            counts=counts.table,
            rows_sent=rows_sent,
            rows_received=received[:, 0].tolist(),
            assignments_sent=assignments_sent,
            assignments_received=received[:, -1].tolist(),
            tokens_per_expert=torch.from_numpy(received[:, 1:-1].sum(0)),
        )

    def copy_out(self, state: HopState, tokens: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [rows, H]: each token once for each of its ranks, by rank."""
        return expand(tokens, state.send.token_of_row, state.send.rows_of_token)

    def send_rows(self, state: HopState, rows: torch.Tensor) -> torch.Tensor:
        """Rows to their ranks."""
        return exchange_rows(rows, state.rows_sent, state.rows_received, self.group)

    def send_assignments(self, state: HopState, probs: torch.Tensor) -> tuple[torch.Tensor, HopState]:
        """Probabilities, in the plan's order, to their ranks; the tags that come along are kept in the state."""
        probs, tags = exchange_assignments(
            probs, state.send.tags, state.assignments_sent, state.assignments_received, self.group
        )
        return probs, replace(state, tags_received=tags)

    def return_rows(self, state: HopState, rows: torch.Tensor) -> torch.Tensor:
        """Rows back to where they came from."""
        return exchange_rows(rows, state.rows_received, state.rows_sent, self.group)

    def sum_up(self, state: HopState, rows: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> [T, H]: each token's sum over ranks, in rank order."""
        return reduce(rows, state.send.token_of_row, state.send.rows_of_token)


@dataclass(frozen=True)
class Relay:
    """Rows that arrived at a relay, as tokens of the next hop.

    routing_map: [rows, experts of the node] bool. assignment_at: [rows * experts] which arrived assignment an
    entry of the map is; arbitrary where nothing is routed.
    """

    routing_map: torch.Tensor
    assignment_at: torch.Tensor

    @classmethod
    def of(cls, state: HopState, num_experts: int) -> "Relay":
        """Reads the tags that `state` received. No host synchronisation."""
        expert, first = planning.split_tags(state.tags_received)
        row = first.cumsum(0) - 1
        entry = row * num_experts + expert.long()
        rows = sum(state.rows_received)
        routing_map = torch.zeros(rows * num_experts, dtype=torch.bool, device=expert.device)
        routing_map[entry] = True
        assignment_at = torch.zeros(rows * num_experts, dtype=torch.int64, device=expert.device)
        assignment_at[entry] = torch.arange(len(entry), device=expert.device)
        return cls(routing_map.view(rows, num_experts), assignment_at)

    def pick_probs(self, probs: torch.Tensor, state: HopState) -> torch.Tensor:
        """Probabilities as they arrived -> in the order in which the next hop's `state` sends them."""
        return pick(probs, self.assignment_at[state.send.entry_of_assignment])
