"""A GPT model for timing whole layers: recorded routing, experts as grouped products, any dispatcher, any order.

Routing comes from a trace, so that placement and prediction meet real correlation; the router's own product, its
softmax and its gradient stay. Weights are a function of the seed and of the expert's number, not of its place.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ciera.moe import replay
from megatron_ciera.moe.layer import attach_dispatcher, attach_placement
from megatron_ciera.shuffle.chunk import ChunkShuffle
from megatron_ciera.shuffle.layer import LayerHooks
from megatron_ciera.shuffle.layout import Layout
from megatron_ciera.shuffle.tables import ScoreTables
from placement.prediction import LayerTables

VOCABULARY = 1024


@dataclass(frozen=True)
class Sizes:
    """ranks: tensor and expert parallel. A micro-batch is `columns` sequences of `sequence` tokens."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    experts: int
    topk: int
    sequence: int
    columns: int
    ranks: int


class RecordedRouter(torch.nn.Module):
    """In place of TopKRouter: the experts are the trace's, their probabilities the softmax of its own logits.

    `tokens`: [T, k] experts of the micro-batch in canonical order, set before each step. `layout`: where this
    layer's tokens are, a function that returns None for canonical order.
    """

    def __init__(self, sizes: Sizes, seed: int, dtype: torch.dtype, device):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(sizes.experts, sizes.hidden, generator=generator) / sizes.hidden**0.5
        self.weight = torch.nn.Parameter(weight.to(device, dtype))
        self.weight.sequence_parallel = True
        self.tokens: torch.Tensor | None = None
        self.layout = _canonical

    def forward(self, hidden, padding_mask=None):
        flat = hidden.view(-1, hidden.shape[-1])
        rank = parallel_state.get_tensor_model_parallel_rank()
        layout: Layout | None = self.layout()
        mine = slice(rank * len(flat), (rank + 1) * len(flat))
        experts = self.tokens[mine] if layout is None else self.tokens[layout.token_at[mine]]
        selected = torch.zeros(len(flat), len(self.weight), dtype=torch.bool, device=flat.device)
        selected.scatter_(1, experts, True)
        return replay.probabilities(flat, self.weight, selected), selected


def _canonical():
    return None


class GroupedExperts(torch.nn.Module):
    """Gated MLPs of this rank's experts; `slots`: their numbers."""

    def __init__(self, sizes: Sizes, slots: list[int], seed: int, dtype: torch.dtype, device):
        super().__init__()
        generator = torch.Generator(device)
        first, second = [], []
        for expert in slots:
            generator.manual_seed(seed + expert)
            given = {"generator": generator, "device": device}
            first.append(torch.randn(sizes.hidden, 2 * sizes.ffn, **given) / sizes.hidden**0.5)
            second.append(torch.randn(sizes.ffn, sizes.hidden, **given) / sizes.ffn**0.5)
        self.first = torch.nn.Parameter(torch.stack(first).to(dtype))
        self.second = torch.nn.Parameter(torch.stack(second).to(dtype))

    def forward(self, tokens, tokens_per_expert, probs):
        counts = torch.as_tensor(tokens_per_expert)
        gate, up = _grouped(tokens, self.first, counts).chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up * probs[:, None].to(tokens.dtype)
        return _grouped(inner, self.second, counts), None


def _grouped(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    if rows.dtype == torch.bfloat16 and rows.is_cuda:
        return torch._grouped_mm(rows, weights, offs=counts.cumsum(0).to(rows.device, torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def build(sizes: Sizes, dtype: torch.dtype, device, maps: np.ndarray | None, dedup: bool) -> GPTModel:
    """maps: [layers, E] physical_to_logical_map, None for contiguous experts."""
    config = TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        ffn_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        num_moe_experts=sizes.experts,
        moe_router_topk=sizes.topk,
        moe_ffn_hidden_size=8,  # of the experts that GroupedExperts replaces
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=sizes.ranks,
        expert_model_parallel_size=sizes.ranks,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
    )
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    spec = get_gpt_layer_local_spec(sizes.experts, moe_grouped_gemm=False, normalization="RMSNorm")
    model = GPTModel(config, spec, VOCABULARY, sizes.sequence, position_embedding_type="rope").to(
        device, dtype
    )
    local = sizes.experts // sizes.ranks
    rank = parallel_state.get_expert_model_parallel_rank()
    for index, layer in enumerate(model.decoder.layers):
        if dedup:
            attach_dispatcher(layer.mlp)
        slots = np.arange(sizes.experts) if maps is None else maps[index]
        if maps is not None:
            attach_placement(layer.mlp).copy_(torch.from_numpy(maps[index]))
        mine = slots[rank * local : (rank + 1) * local].tolist()
        layer.mlp.router = RecordedRouter(sizes, 100 + index, dtype, device)
        layer.mlp.experts = GroupedExperts(sizes, mine, 1000 * (index + 1), dtype, device)
    return model.train()


def shuffle(
    model: GPTModel, tables: list[LayerTables | None], maps: np.ndarray, residual: str
) -> ChunkShuffle:
    """Attaches token shuffling to every layer, with its own process group."""
    ranks = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    group = dist.new_group(ranks)
    device = next(model.parameters()).device
    config = model.config
    chunk = ChunkShuffle([True] * config.num_layers, group, config.moe_router_topk, device)
    for index, layer in enumerate(model.decoder.layers):
        hooks = LayerHooks(layer, chunk, index, residual)
        layer.mlp.router.layout = hooks.layout
    local = config.num_moe_experts // len(ranks)
    chunk.install(
        {index: ScoreTables.of(of, device) for index, of in enumerate(tables) if of is not None},
        {index: torch.from_numpy(np.argsort(map_) // local).to(device) for index, map_ in enumerate(maps)},
    )
    return chunk


def step(model: GPTModel, sizes: Sizes, routing: torch.Tensor) -> torch.Tensor:
    """Forward and backward of one micro-batch; returns the losses. routing: [layers, T, k] in canonical order."""
    for layer, tokens in zip(model.decoder.layers, routing, strict=True):
        layer.mlp.router.tokens = tokens
    generator = torch.Generator().manual_seed(int(routing[0, 0, 0]))
    words = torch.randint(VOCABULARY, (sizes.columns, sizes.sequence + 1), generator=generator)
    words = words.to(routing.device)
    positions = torch.arange(sizes.sequence, device=words.device).expand(sizes.columns, -1)
    square = torch.ones(1, 1, sizes.sequence, sizes.sequence, dtype=torch.bool, device=words.device)
    losses = model(words[:, :-1], positions, square.triu(1), labels=words[:, 1:].contiguous())
    losses.float().mean().backward()
    return losses.detach()


def gradients(model: GPTModel, sizes: Sizes, routing: torch.Tensor, maps: np.ndarray | None) -> dict:
    """Losses and gradients of a step, fp32, repeated parameters summed over ranks, experts by their own number."""
    model.zero_grad(set_to_none=True)
    found = {"losses": step(model, sizes, routing).float()}
    group = parallel_state.get_tensor_model_parallel_group()
    for name, parameter in model.named_parameters():
        grad = parameter.grad.float()
        if ".experts." in name:
            everyone = grad.new_empty((sizes.ranks * len(grad), *grad.shape[1:]))
            dist.all_gather_into_tensor(everyone, grad.contiguous(), group=group)
            layer = int(name.split("layers.")[1].split(".")[0])
            grad = (
                everyone
                if maps is None
                else everyone[torch.from_numpy(np.argsort(maps[layer])).to(grad.device)]
            )
            grad = grad[group.rank() :: sizes.ranks]
        elif getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=group)
        found[name] = grad
    model.zero_grad(set_to_none=True)
    return found
