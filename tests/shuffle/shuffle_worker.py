"""A real GPT model with MoE layers, trained plain, and from equal states shuffled: losses and all gradients compared.

torchrun … shuffle_worker.py OUT CASE…: each rank writes OUT/rank<R>.json = {case: result}. On four processes
TP = EP = 2 has two data-parallel replicas. On GPUs over NCCL; with CIERA_TEST_LAYERS=transformer_engine the bf16
models have Transformer Engine's layers, and the fp32 one stays local (its fp32 products are rounded to tf32).
"""

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).resolve().parents[2]),
    str(Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parents[1] / "moe"),
]

from megatron_ciera import compat, cpu  # noqa: E402

if cpu.is_needed():
    cpu.install()
compat.install()
if cpu.is_needed():
    cpu.install_megatron_patches()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from names import TRANSFORMER_ENGINE, as_local, parameters_as_local  # noqa: E402
from shuffle_files import random_tables  # noqa: E402

from megatron_ciera.shuffle.chunk import ChunkShuffle  # noqa: E402
from megatron_ciera.shuffle.counters import MOVED  # noqa: E402
from megatron_ciera.shuffle.layer import LayerHooks  # noqa: E402
from megatron_ciera.shuffle.tables import ScoreTables  # noqa: E402

LAYERS, WIDTH, SEQUENCE, VOCABULARY, EXPERTS, TOPK = 5, 32, 32, 64, 8, 2
# name -> (ranks, micro-batch, changes of the config, how the residual follows)
CASES = {
    "TP 2": (2, 1, {}, "exchange"),
    "TP 2, micro-batch 2": (2, 2, {}, "exchange"),
    "TP 4": (4, 1, {}, "exchange"),
    "TP 4, micro-batch 2": (4, 2, {}, "exchange"),
    "TP 2, partial sums": (2, 2, {}, "partial-sums"),
    "TP 2, one dense layer": (2, 2, {"moe_layer_freq": [1, 1, 0, 1, 1]}, "exchange"),
    "TP 2, full recompute": (
        2,
        2,
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        "exchange",
    ),
    "TP 2, selective recompute": (
        2,
        2,
        {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]},
        "exchange",
    ),
    "TP 2, block recompute": (
        2,
        1,
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        "exchange",
    ),
}
for _ranks in (2, 4):
    for _columns in (1, 2):
        CASES[f"TP {_ranks}, micro-batch {_columns}, trained"] = (_ranks, _columns, {}, "exchange")


def device() -> torch.device:
    return torch.device("cpu" if cpu.is_needed() else torch.cuda.current_device())


def build(ranks: int, changes: dict, dtype: torch.dtype) -> GPTModel:
    fused = TRANSFORMER_ENGINE and dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        ffn_hidden_size=2 * WIDTH,
        num_attention_heads=4,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=WIDTH,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=1e-2,
        moe_z_loss_coeff=1e-3,
        add_bias_linear=False,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=fused,
        moe_grouped_gemm=fused,
        moe_permute_fusion=fused,
        attention_backend=AttnBackend.unfused,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=ranks,
        expert_model_parallel_size=ranks,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        **changes,
    )
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    if "moe_layer_freq" in changes:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=fused, normalization="RMSNorm")
    elif fused:
        spec = get_gpt_layer_with_transformer_engine_spec(EXPERTS, moe_grouped_gemm=True)
    else:
        spec = get_gpt_layer_local_spec(EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    model = GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope")
    return model.to(device(), dtype).train()


def shuffle(model: GPTModel, residual: str) -> tuple[ChunkShuffle, list[LayerHooks]]:
    """Random tables: which prediction is made does not matter to what is computed."""
    group = parallel_state.get_tensor_model_parallel_group()
    is_moe = [layer.is_moe_layer for layer in model.decoder.layers]
    chunk = ChunkShuffle(is_moe, group, TOPK, device())
    hooks = [LayerHooks(layer, chunk, index, residual) for index, layer in enumerate(model.decoder.layers)]
    tables = {
        index: ScoreTables.of(random_tables(EXPERTS, group.size(), index), device())
        for index in range(LAYERS)
    }
    expert_to_rank = torch.arange(EXPERTS, device=device()) // (EXPERTS // group.size())
    chunk.install(tables, dict.fromkeys(range(LAYERS), expert_to_rank))
    return chunk, hooks


def watch_routing(
    model: GPTModel, chunk: ChunkShuffle, hooks: list[LayerHooks] | None
) -> dict[int, torch.Tensor]:
    """Layer -> experts of every token of the last step, in canonical order and ascending."""
    seen = {}

    def watch(index):
        def on_route(router, args, output):
            layout = hooks[index].layout() if hooks else None
            seen[index] = chunk.planner.canonical_experts(output[1], layout).sort(1).values

        return on_route

    for index, layer in enumerate(model.decoder.layers):
        if layer.is_moe_layer:
            layer.mlp.router.register_forward_hook(watch(index))
    return seen


def batch(step: int, micro_batch: int):
    """Text of which each token says much about the next, the same on the ranks of a tensor-parallel group."""
    generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    steps = torch.randint(1, 4, (micro_batch, SEQUENCE + 1), generator=generator)
    tokens = steps.cumsum(1) % VOCABULARY
    positions = torch.arange(SEQUENCE).repeat(micro_batch, 1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    parts = tokens[:, :-1], positions, mask, tokens[:, 1:].contiguous()
    return tuple(part.to(device()) for part in parts)


def gradients(model: GPTModel, data) -> dict[str, torch.Tensor]:
    """Losses and every parameter's gradient, summed over the ranks among which a parameter is repeated."""
    tokens, positions, mask, labels = data
    for parameter in model.parameters():
        parameter.grad = None
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    get_moe_metrics_tracker().clear()
    losses = model(tokens, positions, mask, labels=labels)
    losses.float().mean().backward()
    found = {"losses": losses.detach()}
    for name, parameter in model.named_parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        found[as_local(name)] = parameter.grad
    for name, entry in get_moe_metrics_tracker().metrics.items():
        values = entry.values.clone()
        dist.all_reduce(values, group=parallel_state.get_tensor_model_parallel_group())
        found[f"auxiliary loss {name}"] = values
    return found


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def train(model: GPTModel, data) -> None:
    gradients(model, data)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= (0.01 * parameter.grad / parameter.grad.float().norm().clamp(min=1e-3)).to(
                parameter.dtype
            )


def compare(models: dict[str, GPTModel], seen: dict[str, dict], data) -> dict:
    """flipped: tokens that ours routed otherwise than plain did, for which no bound on rounding holds."""
    state = parameters_as_local(models["plain"])
    with torch.no_grad():
        for name in ("ours", "exact"):
            for key, parameter in parameters_as_local(models[name]).items():
                parameter.copy_(state[key])
    found = {name: gradients(model, data) for name, model in models.items()}
    flipped = sum(int((seen["ours"][layer] != of).any(1).sum()) for layer, of in seen["plain"].items())
    again = gradients(models["ours"], data)
    return {
        "same_losses": torch.equal(found["ours"]["losses"], found["plain"]["losses"]),
        "repeated": all(torch.equal(found["ours"][name], value) for name, value in again.items()),
        "flipped": flipped,
        "error": {name: error(value, found["exact"][name]) for name, value in found["ours"].items()},
        "plain_error": {name: error(value, found["exact"][name]) for name, value in found["plain"].items()},
    }


def run_case(name: str) -> dict:
    ranks, micro_batch, changes, residual = CASES[name]
    structure = {key: value for key, value in changes.items() if key == "moe_layer_freq"}
    models = {
        "plain": build(ranks, structure, torch.bfloat16),
        "ours": build(ranks, changes, torch.bfloat16),
        "exact": build(ranks, structure, torch.float32),
    }
    chunk, hooks = shuffle(models["ours"], residual)
    seen = {
        key: watch_routing(model, chunk, hooks if key == "ours" else None) for key, model in models.items()
    }
    result, done = {}, 0
    for iteration in (0, 50, 100) if "trained" in name else (0,):
        for step in range(done, iteration):
            train(models["plain"], batch(step, micro_batch))
        done = iteration
        result[str(iteration)] = compare(models, seen, batch(iteration, micro_batch))
    counts = torch.stack([counter.counts for counter in chunk.counters])
    result["moved"] = counts[:, MOVED].tolist()
    result["passages_left"] = sum(map(len, chunk._kept))
    return result


def main(out: Path, names: list[str]) -> None:
    if not cpu.is_needed():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if cpu.is_needed() else "nccl")
    # Memory that nothing has written is NaN: a row that was planned but never arrived shows.
    torch.use_deterministic_algorithms(True)
    results = {}
    for ranks in sorted({CASES[name][0] for name in names}):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=ranks, expert_model_parallel_size=ranks, expert_tensor_parallel_size=1
        )
        for name in names:
            if CASES[name][0] == ranks:
                results[name] = run_case(name)
        parallel_state.destroy_model_parallel()
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
