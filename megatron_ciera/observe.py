"""A run observed for comparison with another: exact losses and metrics, and digests of the final parameters.

Switched on by MEGATRON_CIERA_OBSERVE=FOLDER, for stock runs too (scripts/loss_compare.py, scripts/quickstart.py).
Files: `iterations.jsonl`, written by the last rank, one object per iteration with float values as Python prints
them (exact for float32); `parameters_rank<R>.json`, SHA-256 of each parameter's bytes on each rank; on GPUs
`memory_rank<R>.json`, the most bytes that PyTorch's allocator had given out at once.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

VARIABLE = "MEGATRON_CIERA_OBSERVE"
# How rank 0 begins its line about a run without an iteration, which leaves no record.
UNTRAINED = "nothing was trained:"


def folder() -> Path | None:
    """The folder named by MEGATRON_CIERA_OBSERVE, or None."""
    name = os.environ.get(VARIABLE)
    return Path(name) if name else None


class Observer:
    """Writes what one run did."""

    def __init__(self, path: Path):
        self.path = path
        # A rerun starts the file anew instead of appending to an old one.
        self._first = True

    def iteration(self, iteration: int, losses: Mapping, grad_norm, metrics: Mapping[str, float]) -> None:
        """Appends one line. Host synchronisation: the losses are read. Call on one rank."""
        self.path.mkdir(parents=True, exist_ok=True)
        record = {
            "iteration": iteration,
            "losses": {name: float(value) for name, value in losses.items()},
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "metrics": dict(metrics),
        }
        with open(self.path / "iterations.jsonl", "w" if self._first else "a") as file:
            file.write(json.dumps(record) + "\n")
        self._first = False

    def tail(
        self, metrics: Mapping[str, float], effect: Mapping[str, str], without_effect: Mapping[str, str]
    ) -> None:
        """Adds to the last record what is known after it. Call on one rank.

        "tail": metrics counted since. "effect": flags and what they did in the run. "without_effect": those that
        changed nothing, and why.
        """
        file = self.path / "iterations.jsonl"
        known = {
            "tail": dict(metrics),
            "effect": dict(effect),
            "without_effect": dict(without_effect),
        }
        known = {name: values for name, values in known.items() if values}
        if self._first or not known:
            return
        *before, last = file.read_text().splitlines()
        record = json.loads(last) | known
        file.write_text("\n".join([*before, json.dumps(record)]) + "\n")

    def parameters(self, model_chunks: list, rank: int) -> None:
        """Writes the digests of this rank's parameters."""
        self.path.mkdir(parents=True, exist_ok=True)
        digests = {}
        for index, chunk in enumerate(model_chunks):
            for name, parameter in chunk.named_parameters():
                digests[f"{index}.{name}"] = digest(parameter)
        (self.path / f"parameters_rank{rank}.json").write_text(json.dumps(digests, indent=1))
        if torch.cuda.is_available():
            peak = {"max_memory_allocated": torch.cuda.max_memory_allocated()}
            (self.path / f"memory_rank{rank}.json").write_text(json.dumps(peak))


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes, whatever its dtype; of a quantized parameter's values. Copies it to the host."""
    plain = tensor.detach()
    if type(plain) is not torch.Tensor:  # Transformer Engine's fp8 parameters are tensors of their own kind
        plain = plain.dequantize()
    flat = plain.contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def read_iterations(path: Path) -> list[dict]:
    """The records of `iterations.jsonl` in a folder.

    Raises:
        ValueError: the file is not there.
    """
    file = path / "iterations.jsonl"
    if not file.is_file():
        raise ValueError(
            f"{file}: not found, wanted what an observed run writes: {VARIABLE} counts in a training launched "
            "through megatron_ciera (scripts/pretrain_gpt.py), from the first iteration that is logged: give "
            "--log-interval 1"
        )
    return [json.loads(line) for line in file.read_text().splitlines()]


def clear(path: Path) -> None:
    """Removes what an earlier run left in a folder: it may have had more ranks than the next."""
    for pattern in ("iterations.jsonl", "parameters_rank*.json", "memory_rank*.json"):
        for file in path.glob(pattern):
            file.unlink()


def metric(record: dict, name: str) -> float:
    """A count of one record, with what came after it if it is the last; 0 if it was not reported."""
    return record["metrics"].get(name, 0.0) + record.get("tail", {}).get(name, 0.0)


def read_peak_memory(path: Path) -> int | None:
    """Bytes of the rank with the highest peak of allocated memory; None for a run without GPUs."""
    found = [json.loads(file.read_text())["max_memory_allocated"] for file in path.glob("memory_rank*.json")]
    return max(found, default=None)


def read_parameters(path: Path) -> dict[str, dict[str, str]]:
    """Digests per rank: {"parameters_rank0.json": {name: sha256}}."""
    return {file.name: json.loads(file.read_text()) for file in sorted(path.glob("parameters_rank*.json"))}
