"""What is attached to each MoE layer: the column permutation, the dispatcher, the counter, logical names."""

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_ciera.moe import plan
from megatron_ciera.moe.counters import LayerCounter
from megatron_ciera.moe.dispatcher import DedupTokenDispatcher
from megatron_ciera.moe.logical_checkpoint import save_logically
from megatron_ciera.moe.node_groups import NodeGroups
from megatron_ciera.moe.recorder import RouteRecorder

BUFFER = "physical_to_logical_map"


def attach_placement(layer: MoELayer, recorder: RouteRecorder | None = None) -> torch.Tensor:
    """Gives the layer a placement, contiguous at first, and returns its map: [E] int64, changed in place.

    The router keeps logical numbers. Between it and the dispatcher, columns are put in slot order, which
    is what dispatcher and experts see. Checkpoints name experts logically.
    """
    device = next(layer.router.parameters()).device
    mapping = torch.arange(layer.config.num_moe_experts, device=device)
    # Not persistent: a plain checkpoint has no such entry, and would not load.
    layer.register_buffer(BUFFER, mapping, persistent=False)
    save_logically(layer.experts, mapping)
    by_slot = layer.token_dispatcher.dispatch_preprocess

    def dispatch_preprocess(hidden_states, routing_map, probs):
        if recorder is not None and layer.training and torch.is_grad_enabled():
            recorder.add(routing_map)
        columns = layer.get_buffer(BUFFER)  # wherever the layer has been moved to since
        return by_slot(hidden_states, routing_map.index_select(1, columns), _Columns.apply(probs, columns))

    layer.token_dispatcher.dispatch_preprocess = dispatch_preprocess
    return mapping


def attach_dispatcher(layer: MoELayer, nodes: NodeGroups | None = None) -> None:
    """Replaces the layer's all-to-all dispatcher by the deduplicating one. Before `attach_placement`.

    nodes: groups for two hops; None sends each row straight to its rank.
    """
    stock = layer.token_dispatcher
    if type(stock) is not MoEAlltoAllTokenDispatcher:
        raise ValueError(
            f"--dedup-dispatch: layer {layer.layer_number} has {type(stock).__name__}, needs "
            "MoEAlltoAllTokenDispatcher. Add --moe-token-dispatcher-type alltoall, or leave out --dedup-dispatch."
        )
    layer.token_dispatcher = DedupTokenDispatcher.in_place_of(stock, nodes)
    if stock.shared_experts is not None:
        layer.token_dispatcher.set_shared_experts(stock.shared_experts)


def attach_counter(layer: MoELayer) -> LayerCounter:
    """Counts the layer's training forwards: evaluation and a checkpointed first pass have no gradients."""
    dispatcher = layer.token_dispatcher
    relays = getattr(dispatcher, "inside", None) is not None
    device = next(layer.router.parameters()).device
    counter = LayerCounter.zeros(dispatcher.ep_size, layer.config.num_moe_experts, device, relays)

    def counts() -> bool:
        return layer.training and torch.is_grad_enabled()

    def on_route(routing_map):
        if counts():
            counter.add(plan.count(routing_map, dispatcher.ep_size).table, len(routing_map))

    def on_hop(state, inside):
        if counts() and relays:
            group = dispatcher.inside.group if inside else dispatcher.first.group
            counter.add_hop(state.counts, group.rank(), inside)
        elif counts():
            counter.add(state.counts, len(state.send.rows_of_token))

    if isinstance(dispatcher, DedupTokenDispatcher):
        dispatcher.on_hop = on_hop
        dispatcher.on_route = on_route if relays else None
        return counter
    uncounted = dispatcher.dispatch_preprocess

    def dispatch_preprocess(hidden_states, routing_map, probs):
        on_route(routing_map)
        return uncounted(hidden_states, routing_map, probs)

    dispatcher.dispatch_preprocess = dispatch_preprocess
    return counter


class _Columns(torch.autograd.Function):
    """Forward: columns in slot order. Backward: columns in logical order; both are pure copies."""

    @staticmethod
    def forward(ctx, x, mapping):
        # Autograd would complain if the map changed before backward: it changes between steps only.
        ctx.save_for_backward(mapping)
        return x.index_select(1, mapping)

    @staticmethod
    def backward(ctx, grad):
        (mapping,) = ctx.saved_tensors
        return torch.empty_like(grad).index_copy_(1, mapping, grad), None
