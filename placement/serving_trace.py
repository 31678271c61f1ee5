"""Reads routing dumps of serving engines: routed experts of vLLM and SGLang, SGLang's recorder.

- vLLM (`--enable-return-routed-experts`), JSON or JSONL of responses: `prompt_routed_experts` and
  `routed_experts`, each [tokens, layers, topk] as nested lists or as base64 of an `.npy`.
- SGLang (`return_routed_experts`), JSON or JSONL: base64 of int32, flat [tokens, layers, topk]; the shape is
  not in the file and has to be given.
- SGLang recorder, mode per_token (`.pt`, read with torch): `records[*]["topk_ids_of_layer"]` [layers, tokens,
  8], -1 where nothing was selected; ids are physical slots, mapped back by `last_physical_to_logical_map`.
- Load only (SGLang `logical_count`, EPLB `weight`): refused here, read by `load_file.py`.
"""

import base64
import binascii
import io
import json
from pathlib import Path

import numpy as np

from placement.file import DECODER, LayerId
from placement.load_file import LOAD_NAMES, LOAD_ONLY_REASON, load_torch

_KEYS = ("prompt_routed_experts", "routed_experts")


class ServingTrace:
    """Streams serving dumps, one response or record at a time. Row i is the i-th MoE layer."""

    source_layers = "moe_order"
    ranks = ()
    iteration = None

    def __init__(self, paths, shape: tuple[int, int] | None = None):
        """`shape`: (MoE layers, topk), needed for SGLang's flat arrays only."""
        self.paths = [Path(path) for path in paths]
        self.shape = shape
        self.source = ", ".join(path.name for path in self.paths)
        self.num_lines = self.num_damaged = 0
        first = next(self.blocks(), None)
        if first is None:
            raise ValueError(
                f"trace {self.source}: no routed experts in it; record with routed experts returned"
            )
        self.layer_ids = tuple(LayerId(DECODER, layer) for layer in range(len(first)))

    @property
    def notes(self) -> list[str]:
        """What was left out, one line each."""
        found = f"trace {self.source}: {self.num_damaged} damaged lines left out"
        return [found] if self.num_damaged else []

    def check_damage(self) -> None:
        """Raises ValueError when more than 5 % (and more than one) of the lines read so far are damaged."""
        if self.num_damaged > max(1, 0.05 * self.num_lines):
            raise ValueError(
                f"trace {self.source}: {self.num_damaged} of {self.num_lines} lines are damaged, more than 5%; "
                "record again"
            )

    def blocks(self):
        """Yields [layers, tokens, topk] int32 of one response after the other."""
        self.num_lines = self.num_damaged = 0
        shape = None
        for path in self.paths:
            reader = _recorder_blocks(path) if path.suffix == ".pt" else self._json_blocks(path)
            for block in reader:
                if shape is not None and (block.shape[0], block.shape[2]) != shape:
                    raise ValueError(
                        f"trace {path}: layers and topk are {(block.shape[0], block.shape[2])}, before they "
                        f"were {shape}; give dumps of one model"
                    )
                shape = (block.shape[0], block.shape[2])
                yield block
        self.check_damage()

    def _json_blocks(self, path: Path):
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [file.read()] if path.suffix == ".json" else file
            for line in lines:
                if not line.strip():
                    continue
                self.num_lines += 1
                try:
                    found = list(_find_experts(json.loads(line)))
                except json.JSONDecodeError:
                    self.num_damaged += 1
                    continue
                for value in found:
                    tokens = self._decode(value, path)
                    if len(tokens):
                        yield np.ascontiguousarray(tokens.transpose(1, 0, 2), dtype=np.int32)

    def _decode(self, value, path: Path) -> np.ndarray:
        """[tokens, layers, topk] of nested lists, base64 `.npy`, or base64 of flat int32."""
        if isinstance(value, str):
            try:
                raw = base64.b64decode(value, validate=True)
            except binascii.Error:
                raise ValueError(f"trace {path}: routed experts are neither lists nor base64") from None
            if raw.startswith(b"\x93NUMPY"):
                value = np.load(io.BytesIO(raw))
            else:
                value = self._reshape(np.frombuffer(raw, dtype=np.int32), path)
        tokens = np.asarray(value)
        if tokens.ndim != 3 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"trace {path}: routed experts have shape {list(tokens.shape)} and dtype {tokens.dtype}, "
                "wanted integers [tokens, layers, topk]"
            )
        return tokens

    def _reshape(self, flat: np.ndarray, path: Path) -> np.ndarray:
        if self.shape is None:
            raise ValueError(
                f"trace {path}: SGLang's routed experts are flat; give --serving-shape LAYERS TOPK (MoE layers "
                "and experts per token of the model)"
            )
        if len(flat) % (self.shape[0] * self.shape[1]):
            raise ValueError(
                f"trace {path}: {len(flat)} values are not a multiple of --serving-shape {self.shape[0]} "
                f"{self.shape[1]}; give MoE layers and topk of the model"
            )
        return flat.reshape(-1, *self.shape)


def is_serving_trace(path: Path) -> bool:
    """True for the file kinds that serving engines write."""
    return path.is_file() and path.suffix in (".json", ".jsonl", ".pt")


def _find_experts(value):
    """Yields the routed experts of a response, prompt before generated, wherever they are nested."""
    if isinstance(value, list):
        for item in value:
            yield from _find_experts(item)
    elif isinstance(value, dict):
        for key in _KEYS:
            if value.get(key) is not None:
                yield value[key]
        for key, item in value.items():
            if key not in _KEYS and isinstance(item, (dict, list)):
                yield from _find_experts(item)


def _recorder_blocks(path: Path):
    content = load_torch(path)
    if not isinstance(content, dict) or "records" not in content:
        keys = sorted(content) if isinstance(content, dict) else type(content).__name__
        if isinstance(content, dict) and set(LOAD_NAMES) & set(content):
            raise ValueError(f"trace {path}: holds only expert loads ({', '.join(keys)}): {LOAD_ONLY_REASON}")
        raise ValueError(f"trace {path}: found {keys}, wanted SGLang's per_token records; use mode per_token")
    if "last_physical_to_logical_map" not in content:
        raise ValueError(
            f"trace {path}: found {', '.join(sorted(content))}, wanted last_physical_to_logical_map beside "
            "records: without it slots cannot be told from experts; dump it with SGLang's own recorder"
        )
    to_logical = np.asarray(content["last_physical_to_logical_map"])
    for record in content["records"]:
        slots = np.asarray(record["topk_ids_of_layer"])
        width = int((slots >= 0).any(axis=(0, 1)).sum())
        slots = slots[:, :, :width]
        slots = slots[:, (slots >= 0).all(axis=(0, 2))]
        if slots.size:
            yield np.take_along_axis(to_logical[:, None, :].astype(np.int32), slots.astype(np.int64), axis=2)
