"""Dispatch + experts + combine, ours against stock, on recorded routing: parity first, then time and bytes."""

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from megatron_ciera.moe import replay, traffic
from megatron_ciera.moe.plan import tag_dtype
from placement.cli_common import output_file

PARITY_FACTOR = 2.0
_LINK_VARIABLES = (
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NET",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_SOCKET_NTHREADS",
)


def arguments() -> argparse.ArgumentParser:
    """The command line of scripts/bench_dispatch.py."""
    parser = argparse.ArgumentParser(
        description="torchrun --nproc-per-node EP scripts/bench_dispatch.py TRACE.npz [--json]; "
        "with --count, counts rows at larger expert-parallel sizes in one process instead"
    )
    parser.add_argument("trace", help=".npz with arrays [layers, tokens, topk]")
    parser.add_argument("--array", default=None, help="array of the trace; default: the last one")
    parser.add_argument("--fit-tokens", type=int, default=4096)
    parser.add_argument("--skip-tokens", type=int, default=16384, help="replay starts behind these")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank and micro-batch")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--ffn-hidden-size", type=int, default=512)
    parser.add_argument("--num-experts", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--label", default="", help="what the link stands for")
    parser.add_argument("--count", type=int, nargs="+", default=None, metavar="EP")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="for --count")
    parser.add_argument("--output", type=output_file, default=None, help="also write the JSON here")
    parser.add_argument("--json", action="store_true")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; 1 when parity fails, and then prints no times."""
    options = arguments().parse_args(argv)
    with np.load(options.trace) as trace:
        name = options.array or trace.files[-1]
        tokens = trace[name]
    if options.count:
        return _report(_count(options, tokens, name), options, _count_table)
    rank = _start()
    result = _measure(options, tokens, name)
    code = _report(result, options, _time_table) if rank == 0 else 0
    failed = torch.tensor([code if rank == 0 else 0], device=_device())
    dist.broadcast(failed, 0)
    dist.destroy_process_group()
    return int(failed)


def _report(result: dict, options, table) -> int:
    text = json.dumps(result)
    if options.output:
        with open(options.output, "w") as file:
            file.write(text + "\n")
    print(text if options.json else table(result), flush=True)
    return 1 if result.get("parity") is False else 0


def _count(options, tokens: np.ndarray, name: str) -> dict:
    unseen = tokens[:, options.skip_tokens :]
    contiguous = np.tile(np.arange(options.num_experts), (len(tokens), 1))
    sizes = []
    for size in options.count:
        per_node = min(options.ranks_per_node, size)
        fitted = replay.fitted_maps(tokens[:, : options.fit_tokens], options.num_experts, size, per_node)
        cost = traffic.RowBytes(2 * options.hidden_size, 4, tag_dtype(options.num_experts // size).itemsize)
        entry = {"expert_parallel_size": size, "ranks_per_node": per_node}
        for placement, maps in (("contiguous", contiguous), ("correlated", fitted)):
            entry[placement] = traffic.counted(unseen, maps, size, per_node, cost)
        sizes.append(entry)
    return {"trace": options.trace, "array": name, "tokens": unseen.shape[1], "sizes": sizes}


def _count_table(result: dict) -> str:
    lines = [
        f"{result['trace']} {result['array']}: {result['tokens']} unseen tokens, means over layers and tokens; "
        "+: with correlated placement; kB: 1000 bytes leaving a rank, leaving a node",
        "EP | rows: stock | per rank | + | per node | + || kB: stock | per rank | + || between nodes: stock | "
        "per rank | + | per node | +",
    ]
    for entry in result["sizes"]:
        plain, placed = entry["contiguous"], entry["correlated"]
        rows = [plain["rows_stock"], plain["rows_per_rank"], placed["rows_per_rank"]]
        rows += [plain["rows_per_node"], placed["rows_per_node"]]
        kb = [plain["bytes_stock"], plain["bytes_per_rank"], placed["bytes_per_rank"]]
        between = [plain["internode_bytes_stock"]]
        for key in ("internode_bytes_per_rank", "internode_bytes_per_node"):
            between += [plain[key], placed[key]]
        cells = [f"{value:.2f}" for value in rows] + [f"{value / 1e3:.1f}" for value in kb + between]
        lines.append(f"{entry['expert_parallel_size']} | " + " | ".join(cells))
    return "\n".join(lines)


def _start() -> int:
    from megatron_ciera import cpu

    if cpu.is_needed():
        cpu.install()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() and not cpu.is_needed() else "gloo")
    if cpu.is_needed():
        cpu.install_megatron_patches()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    return dist.get_rank()


def _device() -> torch.device:
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _dispatchers(options) -> dict:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ciera.moe.dispatcher import DedupTokenDispatcher

    world, rank = dist.get_world_size(), dist.get_rank()
    local = options.num_experts // world
    config = TransformerConfig(
        num_layers=1,
        hidden_size=options.hidden_size,
        num_attention_heads=1,
        num_moe_experts=options.num_experts,
        moe_router_topk=options.topk,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=world,
        moe_permute_fusion=importlib.util.find_spec("transformer_engine") is not None,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    groups = SimpleNamespace(
        ep=parallel_state.get_expert_model_parallel_group(),
        expt_tp=parallel_state.get_expert_tensor_parallel_group(),
        tp_ep=parallel_state.get_expert_tensor_and_model_parallel_group(),
    )
    slots = list(range(rank * local, (rank + 1) * local))
    made = {"stock": MoEAlltoAllTokenDispatcher, "dedup": DedupTokenDispatcher}
    return {name: kind(local, slots, config, groups) for name, kind in made.items()}


def _measure(options, tokens: np.ndarray, name: str) -> dict:
    world, rank = dist.get_world_size(), dist.get_rank()
    options.topk, options.world = tokens.shape[2], world
    needed = options.skip_tokens + world * options.tokens
    # Asked on every rank of what all of them need: one that left alone would leave the others waiting.
    if tokens.shape[1] < needed:
        sys.exit(
            f"--tokens {options.tokens}: the trace has {tokens.shape[1]} tokens, {world} ranks need {needed}. "
            "Use fewer tokens or a smaller --skip-tokens."
        )
    device = _device()
    dispatchers = _dispatchers(options)
    contiguous = np.tile(np.arange(options.num_experts), (len(tokens), 1))
    fitted = replay.fitted_maps(tokens[:, : options.fit_tokens], options.num_experts, world, world)
    first = options.skip_tokens + rank * options.tokens
    unseen = tokens[:, first : first + options.tokens]
    inputs = _inputs(options, unseen, {"contiguous": contiguous, "correlated": fitted}, device)
    errors = _parity(options, dispatchers, inputs["correlated"][0])
    result = {
        "trace": options.trace,
        "array": name,
        "label": options.label,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "link": {key: os.environ[key] for key in _LINK_VARIABLES if key in os.environ},
        "settings": {
            key: value for key, value in vars(options).items() if key not in ("json", "output", "count")
        },
        "errors": errors,
        "parity": all(
            worst["dedup"] <= PARITY_FACTOR * worst["stock"] < math.inf for worst in errors.values()
        ),
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
    }
    if not result["parity"]:
        return result
    result["link_gb_s"] = _link_speed(device)
    result["variants"] = [
        _time_variant(options, variant, dispatchers[kind], inputs[placement], device)
        for variant, kind, placement in (
            ("stock", "stock", "contiguous"),
            ("dedup", "dedup", "contiguous"),
            ("dedup + correlated", "dedup", "correlated"),
            ("stock again", "stock", "contiguous"),
        )
    ]
    return result


def _inputs(options, tokens: np.ndarray, maps: dict, device) -> dict[str, list[replay.Inputs]]:
    """Placement -> one micro-batch a layer; the same tokens under every placement."""
    made = {placement: [] for placement in maps}
    for layer, selected in enumerate(tokens):
        shared = None
        for placement, by_layer in maps.items():
            routing_map = replay.routing_map(selected, by_layer[layer], device)
            if shared is None:
                seed = 10 * dist.get_rank() + layer
                shared = replay.make_inputs(routing_map, options.hidden_size, torch.bfloat16, seed)
            made[placement].append(replace(shared, routing_map=routing_map))
    return made


def _parity(options, dispatchers: dict, inputs: replay.Inputs) -> dict[str, dict[str, float]]:
    """Worst relative error over ranks of both dispatchers against fp32, by quantity."""
    generator = torch.Generator().manual_seed(3)
    scale = torch.randn(options.num_experts, options.hidden_size, generator=generator)
    scale = scale.to(inputs.hidden.device, torch.bfloat16)
    local = scale.chunk(dist.get_world_size())[dist.get_rank()]
    exact = replay.exact_step(scale, inputs)
    found = {
        name: replay.step(which, replay.scale_experts(local), inputs) for name, which in dispatchers.items()
    }
    errors = {}
    for quantity in exact:
        worst = torch.tensor(
            [replay.relative_error(found[name][quantity], exact[quantity]) for name in dispatchers],
            device=inputs.hidden.device,
        )
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        errors[quantity] = dict(zip(dispatchers, worst.tolist(), strict=True))
    return errors


def _link_speed(device) -> float:
    """GB/s that a rank sends in an even all-to-all of 256 MB (4 MB on CPU), counting what leaves it."""
    world = dist.get_world_size()
    size = 1 << (28 if device.type == "cuda" else 22)
    sent = torch.empty(size // world * world, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    seconds = _median_seconds(lambda: dist.all_to_all_single(received, sent), 2, 5, device)
    return len(sent) * (world - 1) / world / seconds / 1e9


def _time_variant(options, name: str, dispatcher, inputs: list, device) -> dict:
    local = options.num_experts // dist.get_world_size()
    experts = replay.mlp_experts(local, options.hidden_size, options.ffn_hidden_size, torch.bfloat16, device)
    timed = {"variant": name}
    for label, work, backward in (
        ("dispatch_combine_forward_ms", _pass_through, False),
        ("dispatch_combine_ms", _pass_through, True),
        ("with_experts_ms", experts, True),
    ):
        turn = iter(range(1 << 30))

        def once(work=work, backward=backward, turn=turn):
            chosen = inputs[next(turn) % len(inputs)]
            hidden = chosen.hidden.detach().requires_grad_(backward)
            probs = _given_probabilities(chosen).requires_grad_(backward)
            output = replay.forward(dispatcher, work, hidden, probs, chosen.routing_map)
            if backward:
                output.backward(chosen.grad)

        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        timed[label] = 1e3 * _median_seconds(once, options.warmup, options.iterations, device)
        if device.type == "cuda":
            timed[label.replace("_ms", "_peak_mb")] = (torch.cuda.max_memory_allocated() - before) / 1e6
        if device.type == "cuda" and backward:
            timed[label.replace("_ms", "_host_syncs")] = _host_syncs(once)
    timed |= _volume(options, dispatcher, inputs)
    return timed


def _host_syncs(work) -> int:
    """How often the host waits for the GPU in `work`: what CUDA's debug mode flags, and waits for an event."""
    waits, wait = [], torch.cuda.Event.synchronize

    def counted(event):
        waits.append(event)
        wait(event)

    torch.cuda.Event.synchronize = counted
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as flagged:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.Event.synchronize = wait
    return len(waits) + sum("synchronizing CUDA operation" in str(warning.message) for warning in flagged)


def _pass_through(tokens, tokens_per_expert, probs):
    return tokens * probs[:, None].to(tokens.dtype)


def _given_probabilities(chosen: replay.Inputs) -> torch.Tensor:
    """Equal shares of the selected experts: the router's own work stays out of the times."""
    return (chosen.routing_map / chosen.routing_map.sum(1, keepdim=True)).to(torch.float32)


def _volume(options, dispatcher, inputs: list) -> dict[str, float]:
    """Rows and bytes that leave this rank in a forward pass, means over layers, summed over ranks."""
    from megatron_ciera.moe import plan
    from megatron_ciera.moe.dispatcher import DedupTokenDispatcher

    world, rank = dist.get_world_size(), dist.get_rank()
    dedup = isinstance(dispatcher, DedupTokenDispatcher)
    rows = remote = bytes_sent = 0
    for chosen in inputs:
        counted = plan.count(chosen.routing_map, world).table
        by_rank, assignments = counted[:, 0], counted[:, -1]
        sent = by_rank if dedup else assignments
        elsewhere = torch.arange(world, device=sent.device) != rank
        tag = plan.tag_dtype(options.num_experts // world).itemsize if dedup else 0
        rows += int(sent.sum())
        remote += int(sent[elsewhere].sum())
        bytes_sent += 2 * int(sent[elsewhere].sum()) * options.hidden_size * 2
        bytes_sent += int(assignments[elsewhere].sum()) * (4 + tag)
    totals = torch.tensor([rows, remote, bytes_sent], dtype=torch.float64, device=_device())
    dist.all_reduce(totals)
    names = ("rows", "remote_rows", "bytes")
    return {name: value / len(inputs) for name, value in zip(names, totals.tolist(), strict=True)}


def _median_seconds(work, warmup: int, iterations: int, device) -> float:
    """Median over iterations of the slowest rank's time."""
    times = []
    for number in range(warmup + iterations):
        dist.barrier()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        else:
            begun = time.perf_counter()
            work()
            seconds = time.perf_counter() - begun
        if number >= warmup:
            times.append(seconds)
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def _time_table(result: dict) -> str:
    if not result["parity"]:
        return "parity failed, no times: " + json.dumps(result["errors"])
    lines = [f"{result['label']} {result['device']} {result['link_gb_s']:.1f} GB/s {result['link']}"]
    lines.append(
        "variant             | rows/token | MB out | fwd ms | fwd+bwd ms | + experts ms | of stock | peak MB | syncs"
    )
    stock = result["variants"][0]
    tokens = result["settings"]["tokens"] * result["settings"]["world"]
    for entry in result["variants"]:
        of_stock = entry["dispatch_combine_ms"] / stock["dispatch_combine_ms"]
        lines.append(
            f"{entry['variant']:19s} | {entry['rows'] / tokens:10.3f} | {entry['bytes'] / 1e6:6.1f} | "
            f"{entry['dispatch_combine_forward_ms']:6.3f} | {entry['dispatch_combine_ms']:10.3f} | "
            f"{entry['with_experts_ms']:12.3f} | {of_stock:8.3f} | "
            f"{entry.get('dispatch_combine_peak_mb', 0):7.0f} | {entry.get('dispatch_combine_host_syncs', '')}"
        )
    return "\n".join(lines)
