"""Measures the links of the machines at hand, for the `cluster:` section of a config.

Inside each node all its ranks measure together; between nodes, all ranks of equal local number, at the same time, so
that they share NICs as in training.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron_ciera.record.clock import on_gpu

_SMALL_BYTES = 1 << 14


def measure(group, num_bytes: int, repeats: int) -> dict[str, float]:
    """One level of the network, as keys of a link in `cluster:`; the same on all ranks of the group's world.

    A large collective takes latency × (W - 1) plus its bytes over the bandwidth; a small one the latency alone.
    Times are medians of `repeats`, each the slowest rank's. Host synchronisations: one a repeat.
    """
    size = dist.get_world_size(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")

    def seconds(collective, total: int) -> float:
        share = total // size // 4 * 4
        whole = torch.zeros(share * size, dtype=torch.uint8, device=device)
        part = torch.zeros(share, dtype=torch.uint8, device=device)
        times = []
        for _ in range(repeats + 2):
            dist.barrier(group)
            begin = time.perf_counter()
            collective(whole, part)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        slowest = torch.tensor(times[2:], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.median())

    def rate(collective, moved: float) -> float:
        return moved / max(seconds(collective, num_bytes) - small, 1e-9) / 1e9

    def gather(whole, part):
        dist.all_gather_into_tensor(whole, part, group=group)

    def reduce(whole, part):
        dist.reduce_scatter_tensor(part.view(torch.float32), whole.view(torch.float32), group=group)

    def exchange(whole, part):
        dist.all_to_all_single(torch.empty_like(whole), whole, group=group)

    small = seconds(gather, _SMALL_BYTES * size)
    moved = num_bytes * (size - 1) / size
    return {
        "bandwidth_gb_s": round(rate(gather, moved), 3),
        "latency_us": round(small / (size - 1) * 1e6, 1),
        "reduce_gb_s": round(rate(reduce, moved), 3),
        "all_to_all_gb_s": round(rate(exchange, moved), 3),
    }


def measure_all(num_bytes: int, repeats: int) -> dict[str, dict[str, float]]:
    """`intra_node` and `inter_node`, those that exist. Collective over the world."""
    local, rank, world = int(os.environ["LOCAL_WORLD_SIZE"]), dist.get_rank(), dist.get_world_size()
    levels = {
        "intra_node": [range(first, first + local) for first in range(0, world, local)],
        "inter_node": [range(first, world, local) for first in range(local)],
    }
    found = {}
    for name, members in levels.items():
        if len(members[0]) > 1:
            groups = [dist.new_group(list(ranks)) for ranks in members]
            mine = next(group for group, ranks in zip(groups, members, strict=True) if rank in ranks)
            found[name] = measure(mine, num_bytes, repeats)
    return found


def main(argv: list[str] | None = None) -> None:
    """The command line of scripts/measure_links.py."""
    parser = argparse.ArgumentParser(
        description="Measures the links between all processes that torchrun started, for `cluster:`.",
    )
    parser.add_argument("--num-bytes", type=int, default=1 << 28, help="of the large collectives")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of YAML")
    options = parser.parse_args(argv)
    if "LOCAL_WORLD_SIZE" not in os.environ:
        parser.error(
            "start it with torchrun, one process a GPU: torchrun --nproc-per-node 8 scripts/measure_links.py"
        )
    if on_gpu():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu() else "gloo")
    found = measure_all(options.num_bytes, options.repeats)
    if dist.get_rank() == 0:
        print(json.dumps(found) if options.json else as_yaml(found), flush=True)
    dist.destroy_process_group()


def as_yaml(found: Mapping[str, Mapping[str, float]]) -> str:
    """Lines to paste under `cluster:`."""
    lines = [
        f"  {name}: {{{', '.join(f'{key}: {value}' for key, value in link.items())}}}"
        for name, link in found.items()
    ]
    return "\n".join(["cluster:", *lines])
