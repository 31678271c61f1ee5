"""Checkpoints of TEGroupedMLP under placements, on two processes with or without a GPU: nothing is computed.

torchrun … te_checkpoint_worker.py OUT: rank 0 writes OUT/results.json = {check: bool or list}.
"""

import json
import os
import sys
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1] / "moe")]

from megatron_ciera import cpu  # noqa: E402

if cpu.is_needed():
    cpu.install()
    cpu.install_megatron_patches()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from layer_worker import build  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from names import expert_weights  # noqa: E402

from megatron_ciera.moe.layer import attach_placement  # noqa: E402

EXPERTS = 8
METADATA = [{}, {"singleton_local_shards": True}]


def make(map_=None):
    """A layer, its experts' weights all NaN; `map_` None: without placement."""
    with mock.patch("torch.cuda.is_available", lambda: True):  # Transformer Engine builds nothing without
        layer = build(2, EXPERTS, {})
    for weights in expert_weights(layer).values():
        for weight in weights:
            weight.data.fill_(float("nan"))
    if map_ is not None:
        attach_placement(layer).copy_(torch.tensor(map_))
    return layer


def fill(layer, map_) -> None:
    """Each weight gets values that tell its expert and its place apart."""
    first = dist.get_rank() * layer.num_local_experts
    for part, weights in enumerate(expert_weights(layer).values()):
        for slot, weight in enumerate(weights):
            torch.manual_seed(100 * map_[first + slot] + part)
            weight.data.copy_(torch.randn(weight.shape))


def same(first, second) -> bool:
    pairs = zip(expert_weights(first).values(), expert_weights(second).values(), strict=True)
    here = all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, here)
    return all(everyone)


def entries(layer, metadata) -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return layer.sharded_state_dict(prefix="mlp.", metadata={**metadata, "dp_cp_group": group})


def extra_states(layer, metadata) -> list[str]:
    """Which expert's extra state this layer's entries name, over all ranks."""
    mine = [
        f"{entry.key} {entry.global_offset if not metadata else ''}"
        for entry in entries(layer, metadata).values()
        if "_extra_state" in entry.key and "experts" in entry.key
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return sorted(name for names in everyone for name in names)


def load(layer, folder, metadata) -> None:
    state = dist_checkpointing.load(entries(layer, metadata), str(folder))
    layer.load_state_dict({name.removeprefix("mlp."): value for name, value in state.items()})


def main(out: Path) -> None:
    if not cpu.is_needed():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if cpu.is_needed() else "nccl")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    generator = torch.Generator().manual_seed(0)
    map_a, map_b = (torch.randperm(EXPERTS, generator=generator).tolist() for _ in range(2))
    results = {}
    for metadata in METADATA:
        name = "numbers in keys" if metadata else "numbers as offsets"
        under_a, folder = make(map_a), out / name.replace(" ", "_")
        fill(under_a, map_a)
        if dist.get_rank() == 0:
            folder.mkdir()
        dist.barrier()
        dist_checkpointing.save(entries(under_a, metadata), str(folder))
        for where, map_ in (("a", map_a), ("b", map_b), ("contiguous", None)):
            found, wanted = make(map_), make(map_)
            fill(wanted, map_ or list(range(EXPERTS)))
            load(found, folder, metadata)
            results[f"{name}, loaded under {where}"] = same(found, wanted)
        results[f"{name}, extra states"] = extra_states(under_a, metadata) == extra_states(make(), metadata)
        results[f"{name}, number of extra states"] = len(set(extra_states(under_a, metadata)))
    if dist.get_rank() == 0:
        (out / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
