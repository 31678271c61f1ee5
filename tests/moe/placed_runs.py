"""Runs under a placement, and what must agree between them: parameters by expert, whole checkpoints."""

import re
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from placement.file import DECODER, LayerId, LayerPlacement, Placement
from tests.moe.names import as_local

BY_EXPERT = "--dist-ckpt-optim-fully-reshardable"
EXPERTS = 8


def write_placement(path: Path, expert_parallel: int, seed: int) -> dict[int, list[int]]:
    rng = np.random.default_rng(seed)
    maps = {layer: rng.permutation(EXPERTS) for layer in range(2)}
    layers = tuple(LayerPlacement(LayerId(DECODER, layer), map_) for layer, map_ in maps.items())
    fit = {"tokens": 64, "source": "test", "iteration": 1}
    Placement(EXPERTS, 2, expert_parallel, expert_parallel, layers, fit).save(path)
    return {layer: map_.tolist() for layer, map_ in maps.items()}


def by_expert(run, expert_parallel: int, maps=None) -> dict[tuple, set[str]]:
    """Digests of all parameters of a run, experts under their logical number."""
    digests = {}
    for file, parameters in run.parameters.items():
        rank = int(re.search(r"rank(\d+)", file)[1])
        for name, digest in parameters.items():
            name = as_local(name)
            found = re.search(r"layers\.(\d+)\..*local_experts\.(\d+)\.(.*)", name)
            key = (name,)
            if found:
                layer, place = int(found[1]), int(found[2])
                slot = rank % expert_parallel * (EXPERTS // expert_parallel) + place
                key = (layer, maps[layer][slot] if maps else slot, found[3])
            digests.setdefault(key, set()).add(digest)
    return digests


def placed(folder, name):
    return "--correlated-placement", "--placement-file", folder / f"{name}.json"


def resume(folder, iteration):
    return "--load", folder, "--ckpt-step", iteration


def checkpoint(path: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = FileSystemReader(path / f"iter_{iteration:07d}")
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def same_checkpoint(first: dict, second: dict) -> None:
    """Weights, masters and moments equal bit for bit."""
    assert len([name for name in first if "exp_avg" in name and "experts" in name]) >= 4
    for name in first:
        assert torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)), name
