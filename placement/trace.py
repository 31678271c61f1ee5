"""Routing traces: one reader interface over Megatron's JSONL, `.npz` arrays and serving dumps.

A reader yields blocks of tokens in order; a block holds the same tokens at every MoE layer. Nothing keeps
more than one block in memory, so traces of any length can be read.
"""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from placement.array_trace import ArrayTrace
from placement.file import LayerId
from placement.megatron_trace import MegatronTrace, is_megatron_trace
from placement.serving_trace import ServingTrace, is_serving_trace

_DIGEST_TOKENS = 64


@dataclass(frozen=True)
class RoutingTokens:
    """A window of a trace. `top_indices`: [layers, tokens, topk] integer; `iteration`: last training step."""

    top_indices: np.ndarray
    layer_ids: tuple[LayerId, ...]
    source: str
    source_layers: str | None
    iteration: int | None

    @property
    def digest(self) -> str:
        """Hash of the first tokens, by which `Watch` knows a trace again."""
        return _digest(self.top_indices)


def open_trace(
    paths,
    *,
    array: str | None = None,
    pipeline_parallel_size: int = 1,
    layers_per_stage=None,
    serving_shape: tuple[int, int] | None = None,
):
    """Opens TRACE arguments. Returns a reader with `layer_ids`, `source`, `source_layers`, `blocks()`.

    `paths`: folders or files of Megatron's `router_trace_rank*.jsonl`, `.npz` files, or serving dumps
    (`.json`, `.jsonl`, `.pt`; `serving_shape`: (MoE layers, topk) of flat ones); one kind at a time.
    Raises ValueError naming the path and what it should be.
    """
    paths = [Path(path) for path in paths]
    for path in paths:
        if not path.exists():
            raise ValueError(
                f"trace {path}: no such file or folder; give the folder of --moe-routing-trace-path, one of "
                "its router_trace_rank*.jsonl, or an .npz with top_indices [layers, tokens, topk]"
            )
    if all(is_megatron_trace(path) for path in paths):
        if array:
            raise ValueError(f"--array {array}: Megatron traces have no named arrays; leave --array out")
        return MegatronTrace(paths, pipeline_parallel_size, layers_per_stage)
    if all(path.suffix == ".npz" for path in paths):
        if pipeline_parallel_size > 1:
            raise ValueError(
                f"--pipeline-model-parallel-size {pipeline_parallel_size}: the rows of an .npz are MoE layers "
                "in model order already; leave the flag out"
            )
        return ArrayTrace(paths, array)
    if all(is_serving_trace(path) for path in paths):
        return ServingTrace(paths, serving_shape)
    empty = [path for path in paths if path.is_dir()]
    if empty:
        raise ValueError(
            f"trace {empty[0]}: no router_trace_rank*.jsonl in this folder; train with "
            "--moe-routing-trace-path and give that folder"
        )
    raise ValueError(
        f"trace {', '.join(map(str, paths))}: wanted Megatron's router_trace_rank*.jsonl or their folder, .npz "
        "files, or serving dumps (.json, .jsonl, .pt), one kind at a time; give the folder of "
        "--moe-routing-trace-path"
    )


class Watch:
    """Tells whether the tokens from `first` of a trace are those of a digest, while it is read."""

    def __init__(self, first: int, digest: str):
        self.first, self.digest = first, digest
        self.pieces = []

    def see(self, position: int, block: np.ndarray) -> None:
        """Looks at a block whose first token is token `position` of the trace."""
        low, high = (max(0, at - position) for at in (self.first, self.first + _DIGEST_TOKENS))
        if block[:, low:high].size:
            self.pieces.append(np.array(block[:, low:high]))

    @property
    def found(self) -> bool:
        """Whether they were among the blocks seen."""
        return bool(self.pieces) and _digest(np.concatenate(self.pieces, axis=1)) == self.digest


def _digest(top_indices: np.ndarray) -> str:
    first = np.ascontiguousarray(top_indices[:, :_DIGEST_TOKENS], dtype=np.int32)
    return blake2b(first.tobytes(), digest_size=16).hexdigest()


def iterate_tokens(reader, skip_tokens: int = 0, num_tokens: int | None = None, watch: Watch | None = None):
    """Yields [layers, tokens, topk] blocks of a window of the trace, in bounded memory.

    `num_tokens` None: to the end. `watch` sees the tokens in front of the window as well. Raises ValueError
    when the trace ends before the window does.
    """
    start, wanted, seen = skip_tokens, num_tokens, 0
    for block in reader.blocks():
        if watch:
            watch.see(seen, block)
        size = block.shape[1]
        low = max(0, start - seen)
        high = size if wanted is None else min(size, start + wanted - seen)
        seen += size
        if low < high:
            yield block[:, low:high]
        if wanted is not None and seen >= start + wanted:
            reader.check_damage()
            return
    if seen <= start or (wanted is not None and seen < start + wanted):
        asked = f"--skip-tokens {start}" + (f" --num-tokens {wanted}" if wanted is not None else "")
        if not seen:
            raise ValueError(f"trace {reader.source}: empty, no tokens; record at least one training step")
        raise ValueError(
            f"trace {reader.source}: {seen} tokens, asked for {asked}; ask for fewer, or record a "
            "longer trace (Megatron: more --moe-routing-trace-max-training-iters)"
        )


def read_tokens(reader, skip_tokens: int = 0, num_tokens: int | None = None, progress=None) -> RoutingTokens:
    """Reads a window of the trace whole. `progress(num_tokens)` is called after each block."""
    blocks, seen = [], 0
    for block in iterate_tokens(reader, skip_tokens, num_tokens):
        blocks.append(np.array(block))
        seen += block.shape[1]
        if progress:
            progress(seen)
    return RoutingTokens(
        top_indices=np.concatenate(blocks, axis=1),
        layer_ids=tuple(reader.layer_ids),
        source=reader.source,
        source_layers=reader.source_layers,
        iteration=reader.iteration,
    )
