"""The deduplicating dispatcher: one row for each (token, rank), behind Megatron's six verbs."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_ciera.moe import plan as planning
from megatron_ciera.moe.exchange import exchange_assignments, exchange_rows
from megatron_ciera.moe.rows import expand, pick, reduce


@dataclass(frozen=True)
class DispatchState:
    """Everything that lives from dispatch to combine. Splits are on the host, plans on the device."""

    hidden_shape: torch.Size
    send: planning.SendPlan
    rows_sent: list[int]
    rows_received: list[int]
    assignments_sent: list[int]
    assignments_received: list[int]
    tokens_per_expert: torch.Tensor
    tags_received: torch.Tensor | None = None
    receive: planning.ReceivePlan | None = None


class DedupTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends a token's hidden state once to each rank that holds one of its experts, and one row back.

    The receiver expands rows to experts and sums a token's partial results in fp32 in expert order; the
    sender sums what comes back in rank order. Stock sums in the hidden dtype over experts; gradients flow to
    hidden states and probabilities as in stock. One host synchronisation a layer (stock: one or two).
    Padding to capacity is neither sent nor computed: it contributes zero.
    """

    @classmethod
    def in_place_of(cls, stock: MoEAlltoAllTokenDispatcher) -> "DedupTokenDispatcher":
        """A dispatcher for the same experts and groups as `stock`."""
        groups = SimpleNamespace(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
        return cls(stock.num_local_experts, stock.local_expert_indices, stock.config, groups)

    def __init__(self, num_local_experts, local_expert_indices, config, pg_collection):
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        if self.tp_size > 1:
            raise ValueError(
                f"deduplicating dispatcher: expert tensor parallel size {self.tp_size}, needs 1. "
                "Set --expert-tensor-parallel-size 1, or add --no-dedup-dispatch."
            )
        self.on_count = None
        self._state = None

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        """[S, B, H] tokens -> ([rows, H] rows to send, [assignments] probabilities). NOTE: host sync."""
        if self.drop_and_pad:
            # What pads an expert to its capacity has probability zero, and so contributes nothing.
            routing_map = routing_map & (probs != 0)
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._state = self._plan(routing_map, hidden_states.shape)
        send = self._state.send
        rows = expand(tokens, send.token_of_row, send.rows_of_token)
        return rows, pick(probs.reshape(-1), send.entry_of_assignment)

    def token_dispatch(self, rows, probs):
        """Rows and probabilities to the ranks of their experts."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        state = self._state
        rows = exchange_rows(rows, state.rows_sent, state.rows_received, self.ep_group)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        probs, tags = exchange_assignments(
            probs, state.send.tags, state.assignments_sent, state.assignments_received, self.ep_group
        )
        self._state = replace(state, tags_received=tags)
        return rows, probs

    def dispatch_postprocess(self, rows, probs):
        """Rows expanded to experts: ([assignments, H] by expert, [n] counts on the host, probabilities)."""
        state = self._state
        receive = planning.plan_receive(
            state.tags_received, self.config.moe_router_topk, self.num_local_experts, sum(state.rows_received)
        )
        self._state = replace(state, receive=receive, tags_received=None)
        expanded = expand(rows, receive.row_of_place, receive.places_of_row)
        return expanded, state.tokens_per_expert, pick(probs, receive.assignment_of_place)

    def combine_preprocess(self, hidden_states):
        """[assignments, H] of the experts -> [rows, H]: each token's sum over this rank's experts."""
        receive = self._state.receive
        return reduce(hidden_states, receive.row_of_place, receive.places_of_row)

    def token_combine(self, hidden_states, async_finish=True, allocate_on_comm_stream=True):
        """Rows back to the ranks of their tokens."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        state = self._state
        rows = exchange_rows(hidden_states, state.rows_received, state.rows_sent, self.ep_group)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(rows)
            self.shared_experts.post_forward_comm()
        return rows

    def combine_postprocess(self, rows):
        """[rows, H] -> [S, B, H]: each token's sum over ranks, and the shared experts' output if overlapped."""
        send = self._state.send
        output = reduce(rows, send.token_of_row, send.rows_of_token).view(self._state.hidden_shape)
        self._state = None
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def _plan(self, routing_map: torch.Tensor, hidden_shape: torch.Size) -> DispatchState:
        rows, assignments = planning.count(routing_map, self.ep_size)
        if self.on_count is not None:
            self.on_count(rows, assignments, len(routing_map))
        mine = torch.cat([rows.view(-1, 1), assignments.view(self.ep_size, -1)], dim=1)
        everyone = mine.new_empty((self.ep_size * self.ep_size, mine.shape[1]))
        dist.all_gather_into_tensor(everyone, mine, group=self.ep_group)
        for_me = everyone.view(self.ep_size, self.ep_size, -1)[:, self.ep_rank]
        # NOTE: device-to-host sync, the only one: all splits in one copy, awaited behind the plan's launches.
        sizes = torch.stack([mine, for_me]).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event()
        send = planning.plan_send(routing_map, self.ep_size, self.config.moe_router_topk)
        copied.synchronize()
        sent, received = sizes
        rows_sent, assignments_sent = sent[:, 0].tolist(), sent[:, 1:].sum(1).tolist()
        return DispatchState(
            hidden_shape=hidden_shape,
            send=send.cut_to(sum(rows_sent), sum(assignments_sent)),
            rows_sent=rows_sent,
            rows_received=received[:, 0].tolist(),
            assignments_sent=assignments_sent,
            assignments_received=received[:, 1:].sum(1).tolist(),
            tokens_per_expert=received[:, 1:].sum(0),
        )
