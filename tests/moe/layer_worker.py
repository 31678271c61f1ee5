"""One MoE layer of real Megatron on several processes: every case compares our path with stock and with fp32.

torchrun … layer_worker.py OUT: each rank writes OUT/rank<R>.json = {case: result}. On GPUs over NCCL; with
CIERA_TEST_LAYERS=transformer_engine (names.py) experts are one TEGroupedMLP and permutations are fused.
"""

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from megatron_ciera import cpu  # noqa: E402

if cpu.is_needed():
    cpu.install()
    cpu.install_megatron_patches()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from dense import dense_forward, error, gathered_experts  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from names import TRANSFORMER_ENGINE, expert_weights  # noqa: E402

from megatron_ciera.moe.layer import attach_counter, attach_dispatcher, attach_placement  # noqa: E402
from megatron_ciera.moe.node_groups import make_node_groups  # noqa: E402

TOKENS, HIDDEN, FFN = 48, 64, 32
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
ACTIVATIONS = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
# name -> (topk, experts, changes of the config, how tokens are routed)
CASES = {
    "top2": (2, 8, {}, "free"),
    "top6": (6, 16, {}, "free"),
    "top1": (1, 8, {"moe_router_pre_softmax": True}, "free"),
    "hot expert": (2, 8, {}, "hot"),
    "exact ties": (3, 8, {}, "ties"),
    "one rank gets everything": (2, 8, {}, "first rank"),
    "capacity": (2, 8, {"moe_expert_capacity_factor": 0.5}, "hot"),
    "padded capacity": (
        2,
        8,
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        "hot",
    ),
    "fp32 router": (2, 8, {"moe_router_dtype": "fp32"}, "free"),
    "sigmoid, expert bias, groups": (
        4,
        16,
        {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_dtype": "fp32",
        },
        "free",
    ),
    "selective recompute": (6, 16, SELECTIVE, "free"),
    "shared expert": (2, 8, {"moe_shared_expert_intermediate_size": 32}, "free"),
    "overlapped shared expert": (
        2,
        8,
        {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True},
        "free",
    ),
}
if TRANSFORMER_ENGINE:
    CASES["recomputed activations"] = (6, 16, ACTIVATIONS, "free")


def device() -> torch.device:
    return torch.device("cpu" if cpu.is_needed() else torch.cuda.current_device())


def build(topk, experts, changes, dispatcher="alltoall"):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=4,
        num_moe_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=FFN,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=TRANSFORMER_ENGINE,
        moe_grouped_gemm=TRANSFORMER_ENGINE,
        moe_permute_fusion=TRANSFORMER_ENGINE,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=False,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        **changes,
    )
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    spec = get_moe_module_spec(
        use_te=TRANSFORMER_ENGINE, num_experts=experts, moe_grouped_gemm=TRANSFORMER_ENGINE
    )
    layer = spec(config=config)
    layer.set_layer_number(1)
    return layer.to(device()).train()


def inputs(layer, routing):
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    hidden = torch.randn(TOKENS // 2, 2, HIDDEN, generator=generator)
    grad = torch.randn(TOKENS // 2, 2, HIDDEN, generator=generator).bfloat16()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(5)
        layer.router.weight.copy_(torch.randn(layer.router.weight.shape, generator=generator) * 0.3)
        if routing == "ties":
            # Experts in pairs of the same logit: the third one of a token is always a tie.
            layer.router.weight[1::2] = layer.router.weight[::2]
        elif routing != "free":
            # One feature that is always on decides for some experts.
            hidden[..., 0] = 8.0
            favoured = [1] if routing == "hot" else range(layer.num_local_experts)
            layer.router.weight[:, 0] = 0
            layer.router.weight[list(favoured), 0] = 3.0
    return hidden.bfloat16().to(device()), grad.to(device())


def step(layer, hidden, grad, recompute=False):
    """Forward and backward; returns everything that must agree."""
    hidden = hidden.clone().requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    if recompute:
        output = tensor_parallel.checkpoint(lambda x: layer(x)[0], False, hidden)
    else:
        output, _ = layer(hidden)
    output.backward(grad)
    found = {"output": output.detach(), "hidden": hidden.grad, "router": layer.router.weight.grad}
    for name, weights in expert_weights(layer).items():
        found[name] = torch.stack([weight.grad for weight in weights])
    return found


def routed(layer, hidden):
    with torch.no_grad():
        return layer.router(hidden.view(-1, 1, HIDDEN))


def dense_step(layer, hidden, grad, selected, slot_of_expert):
    """The same in fp32: experts' gradients are summed over the tokens of all ranks, by slot."""
    group = parallel_state.get_expert_model_parallel_group()
    experts = gathered_experts(layer)
    hidden = hidden.float().requires_grad_()
    router = layer.router.weight.detach().float().requires_grad_()
    output = dense_forward(hidden.view(-1, HIDDEN), router, experts, selected, slot_of_expert)
    output.view(hidden.shape).backward(grad.float())
    found = {"output": output.detach().view(hidden.shape), "hidden": hidden.grad, "router": router.grad}
    local = layer.num_local_experts
    for name, weight in experts.items():
        dist.all_reduce(weight.grad, group=group)
        found[name] = weight.grad[group.rank() * local : (group.rank() + 1) * local]
    return found


def distinct_pairs(layer, selected, map_):
    """Independent count: python sets over (token, rank)."""
    local = layer.num_local_experts
    slot = {expert: slot for slot, expert in enumerate(map_.tolist())}
    return len({(token, slot[expert] // local) for token, expert in selected.nonzero().tolist()})


def expected_hops(layer, selected, map_):
    """Rows and assignments that this rank must send inside its node and to others, counted with python sets.

    Two nodes of two ranks: what a rank relays comes from its partner and from itself.
    """
    everyone = [torch.empty_like(selected) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, selected)
    me, local = dist.get_rank(), layer.num_local_experts
    slot = {expert: slot for slot, expert in enumerate(map_.tolist())}
    inside, across = set(), set()
    totals = [0, 0, 0, 0]
    for source, routed in enumerate(everyone):
        for token, expert in routed.nonzero().tolist():
            target = slot[expert] // local
            if source == me and target // 2 != me // 2:
                across.add((token, target // 2))
                totals[3] += 1
            if target // 2 == me // 2 and source % 2 == me % 2 and target != me:
                inside.add((source, token, target))
                totals[2] += 1
    return [len(inside), len(across), *totals[2:]]


def same_bits(first, second):
    return [
        name
        for name in first
        if not torch.equal(first[name].view(torch.int16), second[name].view(torch.int16))
    ]


def run_case(topk, experts, changes, routing, placed, nodes=None):
    stock, ours = build(topk, experts, changes), build(topk, experts, changes)
    hidden, grad = inputs(stock, routing)
    inputs(ours, routing)
    attach_dispatcher(ours, nodes)
    counter = attach_counter(ours)
    map_ = torch.arange(experts)
    if placed:
        # The weights stay where they are: only what the router's columns mean changes.
        map_ = torch.randperm(experts, generator=torch.Generator().manual_seed(3))
        attach_placement(ours).copy_(map_)
        attach_placement(stock).copy_(map_)
    plain = step(stock, hidden, grad)
    found = step(ours, hidden, grad)
    probs, selected = routed(ours, hidden)
    if changes.get("moe_pad_expert_input_to_capacity"):
        selected = selected & (probs != 0)
    result = {
        "rows": int(counter.table[:, 0].sum()),
        "hops": None if nodes is None else counter.hops.tolist(),
        "expected_hops": None if nodes is None else expected_hops(ours, selected, map_),
        "pairs": distinct_pairs(ours, selected, map_),
        "assignments": int(counter.table[:, -1].sum()),
        "selected": int(selected.sum()),
        "repeat": same_bits(found, step(ours, hidden, grad)),
        "recompute": same_bits(found, step(ours, hidden, grad, recompute=True)),
        "counted_three_times": int(counter.table[:, 0].sum()) == 3 * distinct_pairs(ours, selected, map_),
    }
    if "recompute_modules" in changes:
        without = build(topk, experts, {})
        inputs(without, routing)
        attach_dispatcher(without, nodes)
        if placed:
            attach_placement(without).copy_(map_)
        result["recompute"] += same_bits(found, step(without, hidden, grad))
    with torch.no_grad():
        ours(hidden)
    ours.eval()
    ours(hidden)
    result["evaluation_not_counted"] = int(counter.table[:, 0].sum()) == 3 * result["pairs"]
    result["against_stock"] = {name: error(found[name], plain[name]) for name in found}
    if set(changes) <= {"moe_router_dtype"}:
        exact = dense_step(ours, hidden, grad, selected, torch.argsort(map_).tolist())
        result["error"] = {name: error(found[name], exact[name]) for name in found}
        result["stock_error"] = {name: error(plain[name], exact[name]) for name in found}
    return result


def stock_with_placement(dispatcher):
    """Placement in front of a stock dispatcher, experts permuted by hand: the same bits as without."""
    plain, placed = build(2, 8, {}, dispatcher), build(2, 8, {}, dispatcher)
    hidden, grad = inputs(plain, "free")
    inputs(placed, "free")
    map_ = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    weights = {name: value.detach().bfloat16() for name, value in gathered_experts(plain).items()}
    group = parallel_state.get_expert_model_parallel_group()
    local = plain.num_local_experts
    with torch.no_grad():
        for name, by_place in expert_weights(placed).items():
            for place, weight in enumerate(by_place):
                weight.copy_(weights[name][int(map_[group.rank() * local + place])])
    attach_placement(placed).copy_(map_)
    first, second = step(plain, hidden, grad), step(placed, hidden, grad)
    return [name for name in ("output", "hidden", "router") if name in same_bits(first, second)]


def main(out: Path) -> None:
    # Memory from torch.empty is filled with NaN and large integers.
    torch.use_deterministic_algorithms(True, warn_only=True)
    if not cpu.is_needed():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if cpu.is_needed() else "nccl")
    results = {}
    for expert_parallel in (size for size in (2, 4) if size <= dist.get_world_size()):
        parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel)
        for name, (topk, experts, changes, routing) in CASES.items():
            for placed in (False, True):
                key = f"{name}, EP {expert_parallel}{', placed' if placed else ''}"
                results[key] = run_case(topk, experts, changes, routing, placed)
        for dispatcher in ("alltoall", "allgather"):
            results[f"stock {dispatcher}, EP {expert_parallel}"] = stock_with_placement(dispatcher)
        if expert_parallel == 4:
            nodes = make_node_groups(parallel_state.get_expert_model_parallel_group(), 2)
            for name, case in CASES.items():
                results[f"{name}, two hops"] = run_case(*case, placed=True, nodes=nodes)
        parallel_state.destroy_model_parallel()
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
