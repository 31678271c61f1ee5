"""How a bucket is cut: shards, pieces and segments. Pure arithmetic, the same on every rank.

A *shard* is one rank's equal, contiguous slice of a bucket and ignores parameter boundaries. A *piece* is a range
inside the shard, the same for all ranks, and the unit that goes over the wire. A *segment* is the part of a piece
that holds parameters of one class; its codec is chosen by class. All offsets and lengths are in values.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Shorter runs of a class join their neighbour: a header each would cost more than it saves.
MIN_SEGMENT = 4096

# Pieces start at multiples of one of these: whole hash blocks, or what kernels need to read vectors.
_UNITS = (4096, 64, 1)

CLASSES = ("expert", "attention", "router", "norm", "embedding", "mlp", "other")

# The first pattern that matches decides. `linear_fc1.layer_norm_weight` is a norm fused into a linear layer.
_PATTERNS = (
    ("norm", r"layer_?norm|\bln_|_norm\b|norm\.|norm_weight"),
    ("router", r"router"),
    ("expert", r"(?<!shared_)experts?\b"),
    ("attention", r"attention|linear_qkv|linear_proj|linear_q|linear_kv"),
    ("embedding", r"embedding|output_layer"),
    ("mlp", r"mlp|shared_experts|linear_fc"),
)


@dataclass(frozen=True)
class ClassRun:
    """Values `start` to `end` of a bucket hold a parameter of class `kind`."""

    start: int
    end: int
    kind: str


@dataclass(frozen=True)
class Segment:
    """`length` values from `start` (inside the shard) of the shard of rank `owner` of bucket `bucket`."""

    bucket: int
    owner: int
    start: int
    length: int
    kind: str


@dataclass(frozen=True)
class Piece:
    """Values `start` to `start + length` of every shard; `segments[r]` cover them on rank r, in order."""

    start: int
    length: int
    segments: tuple[tuple[Segment, ...], ...]


def parameter_class(name: str) -> str:
    """The class of a parameter from its name in the model: one of CLASSES."""
    for kind, pattern in _PATTERNS:
        if re.search(pattern, name):
            return kind
    return "other"


def cut_bucket(
    num_values: int, group_size: int, runs: Iterable[ClassRun], piece_values: int, bucket: int = 0
) -> tuple[Piece, ...]:
    """Cuts a bucket into pieces of at most `piece_values` values a rank, and those into segments.

    Args:
        num_values: size of the bucket with all padding; a multiple of `group_size`.
        group_size: ranks that share it.
        runs: the parameters in it, in any order. Padding belongs to the parameter before it.
        piece_values: upper limit of a piece's length.
        bucket: its number in the group, which goes into the segments.

    Raises:
        ValueError: the bucket does not divide into equal shards.
    """
    if num_values % group_size:
        raise ValueError(f"a bucket of {num_values} values cannot be cut into {group_size} equal shards")
    shard = num_values // group_size
    kinds = _fill(sorted(runs, key=lambda run: run.start), num_values)
    pieces = []
    start = 0
    for length in piece_lengths(shard, piece_values):
        segments = tuple(
            tuple(_segments(kinds, bucket, owner, owner * shard, start, length))
            for owner in range(group_size)
        )
        pieces.append(Piece(start, length, segments))
        start += length
    return tuple(pieces)


def piece_lengths(shard: int, piece_values: int) -> list[int]:
    """Cuts `shard` values into pieces of at most `piece_values`, equal but for the first and the last.

    Those are half as long: nothing hides the encoding of the first piece and the decoding of the last.
    """
    if shard <= piece_values:
        return [shard] if shard else []
    unit = next(unit for unit in _UNITS if 16 * unit <= piece_values or unit == 1)
    count = -(-shard // piece_values)
    lengths = _cut(shard, count, unit)
    return lengths if max(lengths) <= piece_values else _cut(shard, count + 1, unit)


def _cut(shard: int, count: int, unit: int) -> list[int]:
    """`count` - 1 equal lengths between two halves, all ends but the last at multiples of `unit`."""
    ends = [(2 * index + 1) * shard // (2 * count) // unit * unit for index in range(count)] + [shard]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _fill(runs: Sequence[ClassRun], num_values: int) -> list[ClassRun]:
    """Runs without gaps, neighbours of one class joined."""
    starts = [0] + [run.start for run in runs[1:]] + [num_values]
    filled: list[ClassRun] = []
    for run, start, end in zip(runs, starts, starts[1:], strict=False):
        if filled and filled[-1].kind == run.kind:
            filled[-1] = ClassRun(filled[-1].start, end, run.kind)
        else:
            filled.append(ClassRun(start, end, run.kind))
    return filled or [ClassRun(0, num_values, "other")]


def _segments(
    kinds: Sequence[ClassRun], bucket: int, owner: int, shard_start: int, start: int, length: int
) -> list[Segment]:
    first, last = shard_start + start, shard_start + start + length
    parts = [
        (max(run.start, first), min(run.end, last), run.kind)
        for run in kinds
        if run.start < last and run.end > first
    ]
    return [Segment(bucket, owner, a - shard_start, b - a, kind) for a, b, kind in _join_short(parts)]


def _join_short(parts: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Joins parts under MIN_SEGMENT to the one before; a short first part joins the one after."""
    joined: list[tuple[int, int, str]] = []
    for start, end, kind in parts:
        previous = joined[-1] if joined else None
        if previous and (previous[2] == kind or end - start < MIN_SEGMENT):
            joined[-1] = (previous[0], end, previous[2])
        elif previous and previous[1] - previous[0] < MIN_SEGMENT:
            joined[-1] = (previous[0], end, kind)
        else:
            joined.append((start, end, kind))
    return joined
