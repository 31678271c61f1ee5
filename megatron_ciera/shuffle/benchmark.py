"""Step time of whole layers at TP = EP: stock, with dedup and placement, with shuffling. Parity first, then times.

Also the planner alone, against its twin, and a profile of one step that says where its kernels ran.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_ciera.moe.replay import relative_error
from megatron_ciera.shuffle.layout import canonical
from megatron_ciera.shuffle.owners import PRICE_ROUNDS
from megatron_ciera.shuffle.planner import Solver
from megatron_ciera.shuffle.profile import overlap_of
from megatron_ciera.shuffle.solve import Shape, unpack
from megatron_ciera.shuffle.tables import ScoreTables
from placement.assignment import assign_owners, capacities, crowding_prices
from placement.cli_common import output_file
from placement.fit import fit_layers
from placement.prediction import LayerTables, fit_tables

PARITY_FACTOR = 2.0
# name -> (placement and dedup, how the residual of a shuffled run follows)
VARIANTS = {
    "stock": (False, None),
    "dedup + placement": (True, None),
    "+ shuffle": (True, "exchange"),
    "+ shuffle, partial sums": (True, "partial-sums"),
}


def arguments() -> argparse.ArgumentParser:
    """The command line of scripts/bench_shuffle.py."""
    parser = argparse.ArgumentParser(
        description="torchrun --nproc-per-node TP scripts/bench_shuffle.py TRACE.npz [--json]"
    )
    parser.add_argument("trace", help=".npz with arrays [layers, tokens, topk]")
    parser.add_argument("--array", default=None, help="array of the trace; default: the last one")
    parser.add_argument("--num-experts", type=int, default=128)
    parser.add_argument("--fit-tokens", type=int, default=4096)
    parser.add_argument("--skip-tokens", type=int, default=16384, help="replay starts behind these")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--ffn-hidden-size", type=int, default=512)
    parser.add_argument("--num-attention-heads", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--planner-ranks", type=int, nargs="*", default=[2, 8, 16])
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        default="nccl",
        help="gloo: processes may share a GPU; parity only counts",
    )
    parser.add_argument("--planner-only", action="store_true", help="no steps; one process will do")
    parser.add_argument("--skip-parity", action="store_true", help="a second link of the same machine")
    parser.add_argument("--label", default="", help="what the link stands for")
    parser.add_argument("--output", type=output_file, default=None, help="also write the JSON here")
    parser.add_argument("--json", action="store_true")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; 1 when parity fails, and then prints no step times, or a plan is not its twin's."""
    options = arguments().parse_args(argv)
    with np.load(options.trace) as trace:
        tokens = trace[options.array or trace.files[-1]].astype(np.int64)
    device = _start(options.backend)
    result = {
        "label": options.label,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "link": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "settings": {name: value for name, value in vars(options).items() if name not in ("json", "output")},
    }
    with torch.cuda.stream(torch.cuda.Stream()):
        result["planner"] = [_time_planner(options, tokens, ranks, device) for ranks in options.planner_ranks]
    result |= {"parity": None} if options.planner_only else _time_steps(options, tokens, device)
    if dist.get_rank() == 0:
        text = json.dumps(result)
        if options.output:
            Path(options.output).write_text(text + "\n")
        print(text if options.json else _table(result), flush=True)
    dist.destroy_process_group()
    return 1 if result["parity"] is False or not all(p["same_as_twin"] for p in result["planner"]) else 0


def _start(backend: str) -> torch.device:
    from megatron_ciera import compat, cpu

    on_cpu = cpu.is_needed()
    if on_cpu:
        cpu.install()
    compat.install()
    if on_cpu:
        cpu.install_megatron_patches()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo" if on_cpu else backend)
    from megatron.core import parallel_state

    world = dist.get_world_size()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world, expert_model_parallel_size=world, expert_tensor_parallel_size=1
    )
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _fit(options, tokens: np.ndarray, ranks: int) -> tuple[np.ndarray, list[LayerTables | None]]:
    fitted = tokens[:, : options.fit_tokens]
    placement = fit_layers(
        fitted, ranks, ranks, num_experts=options.num_experts, for_shuffling=True
    ).placement
    return np.stack([layer.physical_to_logical_map for layer in placement.layers]), fit_tables(
        fitted, placement
    )


def _time_planner(options, tokens: np.ndarray, ranks: int, device) -> dict:
    """One layer's plan of a micro-batch: owners against the twin, milliseconds as launched and as a graph."""
    layer, columns = 2, options.micro_batch_size
    _, tables = _fit(options, tokens[: layer + 1], ranks)
    scores = ScoreTables.of(tables[layer], device)
    count = options.seq_length * columns
    unseen = tokens[:, options.skip_tokens : options.skip_tokens + count]
    before, previous = (torch.from_numpy(unseen[layer - back]).to(device) for back in (2, 1))
    shape = Shape(count, columns, ranks, 0)
    solver, old = Solver(scores, shape), canonical(count, device)
    first = solver(previous, before, old)
    replayed = solver(previous, before, old)
    by_token = scores.scores(previous, before).cpu().numpy().astype(np.float64)
    owner = unpack(replayed, shape).layout.place_of.cpu().numpy() // shape.shard
    room = capacities(options.seq_length, ranks)
    same = torch.equal(first, replayed)
    for column in range(columns):
        part = by_token[column::columns]
        twin = assign_owners(part - crowding_prices(part, room, PRICE_ROUNDS), prices=False)
        same = same and bool((twin == owner[column::columns]).all())
    return {
        "ranks": ranks,
        "same_as_twin": same,
        "launched_ms": _milliseconds(lambda: Solver(scores, shape)(previous, before, old), device),
        "graph_ms": _milliseconds(lambda: solver(previous, before, old), device),
    }


def _milliseconds(work, device, warmup: int = 3, iterations: int = 20) -> float:
    times = []
    for number in range(warmup + iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _synchronize(device)
        begin.record()
        work()
        end.record()
        end.synchronize()
        if number >= warmup:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _synchronize(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _time_steps(options, tokens: np.ndarray, device) -> dict:
    from megatron_ciera.shuffle.bench_model import Sizes

    world = dist.get_world_size()
    maps, tables = _fit(options, tokens, world)
    sizes = Sizes(
        layers=len(tokens),
        hidden=options.hidden_size,
        ffn=options.ffn_hidden_size,
        heads=options.num_attention_heads,
        experts=options.num_experts,
        topk=tokens.shape[2],
        sequence=options.seq_length,
        columns=options.micro_batch_size,
        ranks=world,
    )
    blocks = _blocks(options, tokens, device)
    result = {"parity": None, "errors": None, "same_losses": None}
    if not options.skip_parity:
        result |= _parity(sizes, maps, tables, blocks[0], device)
        if not result["parity"]:
            return result
    result["steps"] = [_time_variant(options, name, sizes, maps, tables, blocks, device) for name in VARIANTS]
    again = _time_variant(options, "stock", sizes, maps, tables, blocks, device)
    result["steps"].append(again | {"variant": "stock again"})
    return result


def _blocks(options, tokens: np.ndarray, device) -> list[torch.Tensor]:
    """Micro-batches of [layers, T, k], the trace's sequences side by side: token position * columns + column."""
    count = options.seq_length * options.micro_batch_size
    blocks = []
    for start in range(options.skip_tokens, tokens.shape[1] - count + 1, count):
        part = tokens[:, start : start + count]
        part = part.reshape(len(part), options.micro_batch_size, options.seq_length, -1)
        blocks.append(torch.from_numpy(part.swapaxes(1, 2).reshape(len(part), count, -1).copy()).to(device))
    if not blocks:
        sys.exit(
            f"the trace has {tokens.shape[1]} tokens, needs {options.skip_tokens + count}; use --skip-tokens"
        )
    return blocks


def _make(name: str, sizes, maps, tables, dtype, device):
    from megatron_ciera.shuffle.bench_model import build, shuffle

    placed, residual = VARIANTS[name]
    # Hooks and modules refer to each other: the last variant is only freed by the collector.
    gc.collect()
    model = build(sizes, dtype, device, maps if placed else None, dedup=placed)
    return model, shuffle(model, tables, maps, residual) if residual else None


def _parity(sizes, maps, tables, routing, device) -> dict:
    """Losses and gradients of every variant against fp32 with stock's; worst relative error of each tensor."""
    from megatron_ciera.shuffle.bench_model import gradients

    found, weights = {}, None
    for name in VARIANTS:
        model, _ = _make(name, sizes, maps, tables, torch.bfloat16, device)
        found[name] = gradients(model, sizes, routing, maps if VARIANTS[name][0] else None)
        weights = weights or {
            key: value.cpu() if torch.is_tensor(value) else value for key, value in model.state_dict().items()
        }
    model, _ = _make("stock", sizes, maps, tables, torch.float32, device)
    model.load_state_dict(weights)
    exact = gradients(model, sizes, routing, None)
    tensors = list(exact)
    errors = torch.tensor(
        [[relative_error(grads[tensor], exact[tensor]) for tensor in tensors] for grads in found.values()],
        device=device,
        dtype=torch.float64,
    )
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    ratios = (errors / errors[0]).max(1).values.tolist()
    same = torch.equal(found["dedup + placement"]["losses"], found["+ shuffle"]["losses"])
    return {
        "parity": all(ratio <= PARITY_FACTOR for ratio in ratios),
        "stock_error": errors[0].max().item(),
        "errors": dict(zip(found, ratios, strict=True)),
        "same_losses": same,
    }


def _time_variant(options, name: str, sizes, maps, tables, blocks, device) -> dict:
    from megatron_ciera.shuffle.bench_model import step

    model, chunk = _make(name, sizes, maps, tables, torch.bfloat16, device)
    times = []
    for number in range(options.warmup + options.iterations):
        if chunk is not None and number == options.warmup:
            chunk.planner.milliseconds()
            chunk.take_host_waits()
            for counter in chunk.counters:
                counter.reset()
        dist.barrier()
        _synchronize(device)
        begun = time.perf_counter()
        step(model, sizes, blocks[number % len(blocks)])
        model.zero_grad(set_to_none=True)
        _synchronize(device)
        if number >= options.warmup:
            times.append(time.perf_counter() - begun)
    slowest = torch.tensor(times, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    timed = {"variant": name, "step_ms": 1e3 * statistics.median(slowest.tolist())}
    if chunk is None:
        return timed
    timed |= _planned(chunk, options.iterations)
    if device.type == "cuda":
        timed["profile"] = overlap_of(lambda: step(model, sizes, blocks[0]))
    return timed


def _planned(chunk, iterations: int) -> dict:
    from megatron_ciera.shuffle.counters import ASSIGNMENTS, LOCAL, LOCAL_CANONICAL, MOVED, PLANNED, SPILLED

    chunk.planner.settle()
    counts = torch.stack([counter.counts for counter in chunk.counters]).sum(0)
    dist.all_reduce(counts)
    plans = chunk.planner.milliseconds()
    seconds, joins = chunk.take_host_waits()
    return {
        "planner_ms": statistics.median(plans),
        "planner_ms_worst": max(plans),
        "host_wait_ms": 1e3 * seconds / joins,
        "locality": int(counts[LOCAL]) / int(counts[ASSIGNMENTS]),
        "locality_by_position": int(counts[LOCAL_CANONICAL]) / int(counts[ASSIGNMENTS]),
        "spill": int(counts[SPILLED]) / int(counts[PLANNED]),
        "rows_moved_per_step": int(counts[MOVED]) / iterations,
    }


def _table(result: dict) -> str:
    lines = [f"{result['label']} {result['device']} {result['link']}"]
    for entry in result["planner"]:
        lines.append(
            f"planner, {entry['ranks']:2d} ranks: {entry['graph_ms']:.3f} ms as a graph, {entry['launched_ms']:.3f} "
            f"launched, same as twin: {entry['same_as_twin']}"
        )
    if "steps" not in result and result["parity"] is None:
        return "\n".join(lines)
    lines.append(f"parity {result['parity']}, worst error of stock against fp32 {result.get('stock_error')}")
    lines.append(f"worst error against stock's of the same tensor {result['errors']}")
    lines.append(f"losses with and without shuffling have the same bits: {result['same_losses']}")
    for entry in result.get("steps", []):
        of_stock = entry["step_ms"] / result["steps"][0]["step_ms"]
        more = {key: value for key, value in entry.items() if key not in ("variant", "step_ms")}
        shown = " ".join(f"{key}={_short(value)}" for key, value in more.items())
        lines.append(f"{entry['variant']:24s} {entry['step_ms']:8.2f} ms {of_stock:6.3f} of stock {shown}")
    return "\n".join(lines)


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
