"""Routing traces: one reader interface over Megatron's JSONL, `.npz` arrays and serving dumps.

A reader yields blocks of tokens in order; a block holds the same tokens at every MoE layer. Nothing keeps
more than one block in memory, so traces of any length can be read.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from placement.array_trace import ArrayTrace
from placement.file import LayerId
from placement.megatron_trace import MegatronTrace, is_megatron_trace, rank_files
from placement.serving_trace import ServingTrace, is_serving_trace


@dataclass(frozen=True)
class RoutingTokens:
    """A window of a trace. `top_indices`: [layers, tokens, topk] integer; `iteration`: last training step."""

    top_indices: np.ndarray
    layer_ids: tuple[LayerId, ...]
    source: str
    source_layers: str | None
    iteration: int | None


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
        files = [file for path in paths for file in rank_files(path)]
        if array:
            raise ValueError(f"--array {array}: Megatron traces have no named arrays; leave --array out")
        return MegatronTrace(files, pipeline_parallel_size, layers_per_stage)
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
    kinds = sorted({path.suffix or "folder" for path in paths})
    raise ValueError(
        f"trace: found {', '.join(kinds)}, wanted Megatron's router_trace_rank*.jsonl, .npz files or serving "
        "dumps, one kind at a time"
    )


def iterate_tokens(reader, skip_tokens: int = 0, num_tokens: int | None = None):
    """Yields [layers, tokens, topk] blocks of a window of the trace, in bounded memory.

    `num_tokens` None: to the end. Raises ValueError when the trace ends before the window does.
    """
    start, wanted, seen = skip_tokens, num_tokens, 0
    for block in reader.blocks():
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
            f"trace {reader.source}: {seen} tokens, asked for {asked}; ask for fewer or record a longer trace"
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
