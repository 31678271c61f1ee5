"""The deduplicating dispatcher: one row for each (token, rank), behind Megatron's six verbs."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_ciera.moe.hop import Hop, HopState, Relay
from megatron_ciera.moe.node_groups import NodeGroups
from megatron_ciera.moe.plan import ReceivePlan, plan_receive
from megatron_ciera.moe.rows import expand, pick, reduce


@dataclass(frozen=True)
class DispatchState:
    """Everything that lives from dispatch to combine. `relayed`: the second hop, inside the node."""

    hidden_shape: torch.Size
    first: HopState
    relayed: HopState | None = None
    receive: ReceivePlan | None = None

    @property
    def last(self) -> HopState:
        return self.first if self.relayed is None else self.relayed


class DedupTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Sends a token's hidden state once to each rank that holds one of its experts, and one row back.

    With `nodes` a token goes once to each node instead, to the rank with the sender's own place in it, which
    relays it inside the node. The receiver expands rows to experts and sums a token's partial results in fp32
    in expert order; relay and sender sum what comes back in rank order. Stock sums in the hidden dtype over
    experts; gradients flow to hidden states and probabilities as in stock. One host synchronisation a layer,
    two with relays (stock: one or two). Padding to capacity is neither sent nor computed: it contributes zero.
    """

    @classmethod
    def in_place_of(
        cls, stock: MoEAlltoAllTokenDispatcher, nodes: NodeGroups | None = None
    ) -> "DedupTokenDispatcher":
        """A dispatcher for the same experts and groups as `stock`."""
        groups = SimpleNamespace(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
        return cls(stock.num_local_experts, stock.local_expert_indices, stock.config, groups, nodes)

    def __init__(self, num_local_experts, local_expert_indices, config, pg_collection, nodes=None):
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection)
        if self.tp_size > 1:
            raise ValueError(
                f"deduplicating dispatcher: expert tensor parallel size {self.tp_size}, needs 1. "
                "Set --expert-tensor-parallel-size 1, or add --no-dedup-dispatch."
            )
        topk = config.moe_router_topk
        self.first = Hop(self.ep_group if nodes is None else nodes.across, topk)
        self.inside = None if nodes is None else Hop(nodes.inside, topk)
        self.on_route = None
        self.on_hop = None
        self._state = None

    def dispatch_preprocess(self, hidden_states, routing_map, probs):
        """[S, B, H] tokens -> ([rows, H] rows to send, [assignments] probabilities). NOTE: host sync."""
        if self.drop_and_pad:
            # What pads an expert to its capacity has probability zero, and so contributes nothing.
            routing_map = routing_map & (probs != 0)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        if self.on_route is not None:
            self.on_route(routing_map)
        state = self._plan(self.first, routing_map)
        self._state = DispatchState(hidden_states.shape, state)
        rows = self.first.copy_out(state, hidden_states.view(-1, hidden_states.shape[-1]))
        return rows, pick(probs.reshape(-1), state.send.entry_of_assignment)

    def token_dispatch(self, rows, probs):
        """Rows and probabilities to the ranks of their experts. NOTE: host sync with relays."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        rows = self.first.send_rows(self._state.first, rows)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(rows)
        probs, first = self.first.send_assignments(self._state.first, probs)
        self._state = replace(self._state, first=first)
        if self.inside is None:
            return rows, probs
        relay = Relay.of(first, self.num_local_experts * self.inside.size)
        relayed = self._plan(self.inside, relay.routing_map)
        rows = self.inside.send_rows(relayed, self.inside.copy_out(relayed, rows))
        probs, relayed = self.inside.send_assignments(relayed, relay.pick_probs(probs, relayed))
        self._state = replace(self._state, relayed=relayed)
        return rows, probs

    def dispatch_postprocess(self, rows, probs):
        """Rows expanded to experts: ([assignments, H] by expert, [n] counts on the host, probabilities)."""
        arrived = self._state.last
        receive = plan_receive(
            arrived.tags_received,
            self.config.moe_router_topk,
            self.num_local_experts,
            sum(arrived.rows_received),
        )
        self._state = replace(self._state, receive=receive)
        expanded = expand(rows, receive.row_of_place, receive.places_of_row)
        return expanded, arrived.tokens_per_expert, pick(probs, receive.assignment_of_place)

    def combine_preprocess(self, hidden_states):
        """[assignments, H] of the experts -> [rows, H]: each token's sum over this rank's experts."""
        receive = self._state.receive
        return reduce(hidden_states, receive.row_of_place, receive.places_of_row)

    def token_combine(self, hidden_states, async_finish=True, allocate_on_comm_stream=True):
        """Rows back to the ranks of their tokens."""
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        state = self._state
        if self.inside is not None:
            rows = self.inside.return_rows(state.relayed, hidden_states)
            hidden_states = self.inside.sum_up(state.relayed, rows)
        rows = self.first.return_rows(state.first, hidden_states)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(rows)
            self.shared_experts.post_forward_comm()
        return rows

    def combine_postprocess(self, rows):
        """[rows, H] -> [S, B, H]: each token's sum, with the shared experts' output if that is overlapped."""
        output = self.first.sum_up(self._state.first, rows).view(self._state.hidden_shape)
        self._state = None
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def _plan(self, hop: Hop, routing_map: torch.Tensor) -> HopState:
        state = hop.plan(routing_map)
        if self.on_hop is not None:
            self.on_hop(state, hop is self.inside)
        return state
