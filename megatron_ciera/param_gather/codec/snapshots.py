"""Weight snapshots as words: `.npz` of bf16 bits, `.pt`, safetensors, or Megatron `torch_dist` checkpoint
folders."""

from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch

from .words import FORMATS, as_words

Tensors = dict[str, torch.Tensor]


def load_snapshot(path: str | Path) -> Tensors:
    """Name -> parameter (bf16, fp16 or fp32, contiguous, on CPU). ValueError when the file holds none.

    uint16 and int16 arrays of an `.npz` are taken as bf16 bits. Of a checkpoint the model's parameters are
    read, not the optimizer's.
    """
    path = Path(path)
    if path.is_dir():
        found = _load_checkpoint(path)
    elif path.suffix == ".npz":
        found = _load_npz(path)
    elif path.suffix == ".safetensors":
        from safetensors.torch import load_file

        found = load_file(path)
    else:
        found = _flatten(_load_torch(path))
    kept = {
        name: value.contiguous() for name, value in found.items() if value.dtype in FORMATS and value.numel()
    }
    if not kept:
        raise ValueError(
            f"{path}: no bf16, fp16 or fp32 parameters found; wanted .npz of uint16 bf16 bits, .pt, "
            ".safetensors or a Megatron torch_dist checkpoint folder"
        )
    return kept


def load_pair(
    before: str | Path, after: str | Path
) -> list[tuple[str, torch.dtype, torch.Tensor, torch.Tensor]]:
    """(name, dtype, old words, new words) for every parameter of two snapshots. ValueError unless they
    match."""
    old, new = load_snapshot(before), load_snapshot(after)
    different = sorted(set(old) ^ set(new))
    if different:
        raise ValueError(
            f"{before} and {after} hold different parameters, such as {different[0]}: "
            "wanted two snapshots of one model"
        )
    for name in old:
        if old[name].shape != new[name].shape or old[name].dtype != new[name].dtype:
            raise ValueError(
                f"{name} is {old[name].dtype} {tuple(old[name].shape)} in {before} and "
                f"{new[name].dtype} {tuple(new[name].shape)} in {after}: wanted the same"
            )
    return [(name, old[name].dtype, as_words(old[name]), as_words(new[name])) for name in old]


def _load_npz(path: Path) -> Tensors:
    with np.load(path) as arrays:
        loaded = {name: np.ascontiguousarray(arrays[name]) for name in arrays.files}
    tensors = {}
    for name, array in loaded.items():
        if array.dtype in (np.uint16, np.int16):
            tensors[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        elif array.dtype in (np.float16, np.float32):
            tensors[name] = torch.from_numpy(array)
    return tensors


def _flatten(value, prefix: str = "") -> Tensors:
    """Tensors of nested dicts under dotted names; a checkpoint's `optimizer` is left out."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    found = {}
    if isinstance(value, dict):
        for key, inner in value.items():
            if str(key) not in ("optimizer", "opt_param_scheduler", "rng_state"):
                found |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return found


def _load_checkpoint(path: Path) -> Tensors:
    """The model of a distributed checkpoint: an iteration's folder, or the folder that names its latest
    one."""
    tracker = path / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        path = path / f"iter_{int(tracker.read_text()):07d}"
    if not (path / ".metadata").exists():
        raise ValueError(
            f"{path}: no .metadata file: wanted a checkpoint saved with --ckpt-format torch_dist"
        )
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = checkpoint.FileSystemReader(path)
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(("optimizer.", "rng_state"))
    }
    checkpoint.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def _load_torch(path: Path):
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, UnpicklingError) as error:
        raise ValueError(
            f"{path}: found a file that torch.load does not read ({str(error).splitlines()[0]}); wanted .npz of "
            "uint16 bf16 bits, .pt, .safetensors or a Megatron torch_dist checkpoint folder"
        ) from error
