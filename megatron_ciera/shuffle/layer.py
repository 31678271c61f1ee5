"""What is attached to each transformer layer: hooks on the modules that both the local and TE's spec have.

The matrix products of `linear_qkv` and `linear_proj` act on each row by itself. So rows are put in the new layout
in front of `linear_proj`, whose own reduce-scatter delivers each token to its owner, and back in canonical order
behind `linear_qkv`, whose own gather collected them. Attention itself never sees another order.
"""

from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ciera.shuffle.chunk import CANONICAL, ChunkShuffle
from megatron_ciera.shuffle.layout import Layout
from megatron_ciera.shuffle.rows import reorder

EXCHANGE = "exchange"


class LayerHooks:
    """Hooks of one layer, `index` in its chunk. The passage lives here from entry to `self_attn_bda`.

    residual: EXCHANGE (rows travel by themselves, exact) or inside attention's partial sums (rounded with them).
    """

    def __init__(self, layer: TransformerLayer, chunk: ChunkShuffle, index: int, residual: str = EXCHANGE):
        self.chunk, self.index = chunk, index
        self._exchanges = residual == EXCHANGE
        self._passage, self._residual = CANONICAL, None
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.self_attention.linear_qkv.register_forward_hook(self._to_canonical)
        layer.self_attention.linear_proj.register_forward_pre_hook(self._to_owners)
        if not self._exchanges:
            linear = layer.self_attention.linear_proj
            # Made for the local RowParallelLinear: the product of this rank's share, before it is reduced.
            linear._forward_impl = self._with_rows(linear._forward_impl)
        layer.self_attn_bda = self._with_residual(layer.self_attn_bda)
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.router.register_forward_hook(self._routed)

    def layout(self) -> Layout | None:
        """The layout of the layer's tokens behind its attention (None: canonical), for who must know it."""
        return self._passage.leaves

    def _enter(self, layer, args, kwargs) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._passage = self.chunk.enter(self.index) if layer.training else CANONICAL
        exchange = self._passage.exchange
        if exchange is not None:
            self._residual = exchange.depart(hidden) if self._exchanges else hidden

    def _to_canonical(self, linear, args, output):
        layout = self._passage.comes
        if layout is None:
            return output
        mixed, bias = output
        return reorder(mixed, layout.place_of, layout.token_at), bias

    def _to_owners(self, linear, args):
        layout = self._passage.leaves
        if layout is None:
            return args
        return reorder(args[0], layout.token_at, layout.place_of), *args[1:]

    def _with_residual(self, original):
        def self_attn_bda(training, fused):
            add = original(training, fused)

            def bias_dropout_add(output_with_bias, residual, probability):
                exchange = self._passage.exchange
                if exchange is None:
                    return add(output_with_bias, residual, probability)
                moved, self._residual = self._residual, None
                if self._exchanges:
                    return add(
                        output_with_bias,
                        exchange.arrive(moved, residual.shape).to(residual.dtype),
                        probability,
                    )
                output, bias = output_with_bias
                return output if bias is None else output + bias

            return bias_dropout_add

        return self_attn_bda

    def _with_rows(self, original):
        """This rank's residual rows added to its partial sums, at the places that their tokens go to."""

        def forward_impl(*args, **kwargs):
            partial = original(*args, **kwargs)
            exchange = self._passage.exchange
            if exchange is None:
                return partial
            width = partial.shape[-1]
            rows = self._residual.reshape(-1, width)
            return partial.view(-1, width).index_add(0, exchange.move.new_place, rows).view(partial.shape)

        return forward_impl

    def _routed(self, router, args, output) -> None:
        if router.training:
            self.chunk.routed(self.index, output[1], columns=args[0].shape[1])
