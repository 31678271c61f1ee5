"""A real GPT model with MoE layers, trained plain and from equal states shuffled: outputs and all gradients compared.

torchrun … shuffle_worker.py OUT CASE…: each rank writes OUT/rank<R>.json = {case: result}. Four processes: TP = EP = 2
twice (data parallel) or TP = EP = 4.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from megatron_ciera import compat, cpu  # noqa: E402

cpu.install()
compat.install()
cpu.install_megatron_patches()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_ciera.shuffle.chunk import ChunkShuffle  # noqa: E402
from megatron_ciera.shuffle.counters import LOCAL, MOVED, NUM_COLUMNS  # noqa: E402
from megatron_ciera.shuffle.layer import LayerHooks  # noqa: E402
from megatron_ciera.shuffle.tables import ScoreTables  # noqa: E402
from placement.prediction import LayerTables  # noqa: E402

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
    "TP 2, block recompute": (
        2,
        1,
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        "exchange",
    ),
}
ITERATIONS = {"TP 2": (0, 50, 100), "TP 4": (0, 50, 100), "TP 4, micro-batch 2": (0, 50, 100)}


def build(ranks: int, changes: dict, dtype: torch.dtype) -> GPTModel:
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
        bias_activation_fusion=False,
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
    spec = get_gpt_layer_local_spec(EXPERTS, moe_grouped_gemm=False, normalization="RMSNorm")
    if "moe_layer_freq" in changes:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope")
    return model.to(dtype).train()


def shuffle(model: GPTModel, residual: str) -> ChunkShuffle:
    """Random tables: which prediction is made does not matter to what is computed."""
    group = parallel_state.get_tensor_model_parallel_group()
    is_moe = [layer.is_moe_layer for layer in model.decoder.layers]
    chunk = ChunkShuffle(is_moe, group, TOPK, "cpu")
    for index, layer in enumerate(model.decoder.layers):
        LayerHooks(layer, chunk, index, residual)
    rng = np.random.default_rng(11)
    tables = {}
    for index in range(LAYERS):
        size = (EXPERTS, group.size())
        singles = [rng.random(size, dtype=np.float32) for _ in range(2)]
        pairs = rng.random((3, group.size()), dtype=np.float32)
        layer = LayerTables(*singles, np.array([3, 17, 40]), pairs, pairs[0], 1.0, 0.0)
        tables[index] = ScoreTables.of(layer, "cpu")
    expert_to_rank = torch.arange(EXPERTS) // (EXPERTS // group.size())
    chunk.install(tables, dict.fromkeys(range(LAYERS), expert_to_rank))
    return chunk


def batch(step: int, micro_batch: int):
    """Text of which each token says much about the next, the same on the ranks of a tensor-parallel group."""
    generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    steps = torch.randint(1, 4, (micro_batch, SEQUENCE + 1), generator=generator)
    tokens = steps.cumsum(1) % VOCABULARY
    positions = torch.arange(SEQUENCE).repeat(micro_batch, 1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
    return tokens[:, :-1], positions, mask, tokens[:, 1:].contiguous()


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
        found[name] = parameter.grad
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
            parameter -= (0.01 * parameter.grad / parameter.grad.float().norm().clamp(min=1e-3)).to(parameter.dtype)


def compare(plain: GPTModel, ours: GPTModel, exact: GPTModel, data) -> dict:
    state = plain.state_dict()
    ours.load_state_dict(state)
    exact.load_state_dict(state)
    expected, found, truth = (gradients(model, data) for model in (plain, ours, exact))
    return {
        "same_losses": torch.equal(found["losses"], expected["losses"]),
        "repeated": all(torch.equal(a, b) for a, b in zip(found.values(), gradients(ours, data).values(), strict=True)),
        "error": {name: error(found[name], truth[name]) for name in found},
        "plain_error": {name: error(expected[name], truth[name]) for name in found},
    }


def run_case(name: str) -> dict:
    ranks, micro_batch, changes, residual = CASES[name]
    structure = {key: value for key, value in changes.items() if key == "moe_layer_freq"}
    plain, exact = build(ranks, structure, torch.bfloat16), build(ranks, structure, torch.float32)
    ours = build(ranks, changes, torch.bfloat16)
    chunk = shuffle(ours, residual)
    result, done = {}, 0
    for iteration in ITERATIONS.get(name, (0,)):
        for step in range(done, iteration):
            train(plain, batch(step, micro_batch))
        done = iteration
        result[iteration] = compare(plain, ours, exact, batch(iteration, micro_batch))
    counts = torch.stack([counter.counts for counter in chunk.counters])
    assert counts.shape[1] == NUM_COLUMNS
    result["moved"] = counts[:, MOVED].tolist()
    result["local"] = counts[:, LOCAL].tolist()
    result["kept"] = sum(map(len, chunk._kept))
    return result


def main(out: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    results = {}
    for ranks in (2, 4):
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
