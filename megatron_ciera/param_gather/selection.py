"""Benefit-driven selection: which segments are worth compressing, and with what. Pure; the same on every rank.

The gain of a segment follows the CIERA paper (arXiv 2609.04609, section 3.2), extended to several codecs:

    gain = Comm(raw bytes) - [Comm(expected payload) + T_decode + T_encode that nothing hides]

Comm is read at the size of the piece that carries the segment, and the segment bears its share: many segments travel
in one gather, so none of them pays the latency alone. Without measured costs (gloo) gains are bytes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_ciera.param_gather.bucket import RAW
from megatron_ciera.param_gather.layout import Piece, Segment


@dataclass(frozen=True)
class ClassStats:
    """What one step did to sampled values of one class, summed over all ranks of the group."""

    values: int = 0
    same: int = 0
    exponent_changed: int = 0
    blocks: int = 0
    blocks_changed: int = 0
    coded_bytes: Mapping[str, int] = field(default_factory=dict)

    def bytes_per_value(self, codec: str) -> float:
        return self.coded_bytes[codec] / self.values

    @property
    def exponent_change_rate(self) -> float:
        return self.exponent_changed / max(1, self.values)

    @property
    def block_change_rate(self) -> float:
        return self.blocks_changed / max(1, self.blocks)


@dataclass(frozen=True)
class Curve:
    """Time over size, measured at some sizes: linear between them, continued with the last slope."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        if len(self.sizes) > 1 and size > self.sizes[-1]:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
            return self.seconds[-1] + max(0.0, slope) * (size - self.sizes[-1])
        return float(np.interp(size, self.sizes, self.seconds))


# What a call costs the host over its time on the device at the smallest size: codec and collective alone are timed,
# the rest of a piece's work is not. Measured on an H200: 0.27 ms a piece and 0.3 ms a wave.
HOST_FACTOR = 2.0


@dataclass(frozen=True)
class Costs:
    """Measured times of this group, the slowest rank's. `comm`: bytes that a rank contributes to an all-gather;
    `encode`, `decode`: values of one rank, by codec."""

    comm: Curve
    encode: Mapping[str, Curve]
    decode: Mapping[str, Curve]
    exchange: float
    overlap: bool = False

    def coded_time(self, codec: str, values: int, payload: float, ranks: int, num_pieces: int) -> float:
        """Seconds for a piece of `values` a rank in payloads of `payload` bytes: encode, wire, decode.

        With overlap, while a piece is on the wire the next is encoded and the last decoded, one after the other on
        the same processors, and the host issues the calls for both; what takes longest hides the rest, but for one
        piece's share of it.
        """
        wire = self.comm(payload)
        work = self.encode[codec](values) + self.decode[codec](values * (ranks - 1))
        if not self.overlap:
            return wire + work
        host = self.host(codec)
        longest = max(wire, work, host)
        return longest + (wire + work + host - longest) / num_pieces

    def host(self, codec: str) -> float:
        """Seconds that the host is busy with one piece."""
        return HOST_FACTOR * (self.encode[codec](0) + self.comm(0) + self.decode[codec](0))


@dataclass(frozen=True)
class Candidate:
    """A segment with a codec that would pay. `gain`: seconds, or bytes; `memory`: bytes of codec state."""

    segment: Segment
    codec: str
    gain: float
    memory: int


@dataclass(frozen=True)
class Row:
    """A line of the decision table: one class of a group. `gain`: a rank's, in seconds or bytes a step."""

    kind: str
    segments: int
    compressed: int
    stats: ClassStats
    codecs: tuple[str, ...]
    ratio: float
    gain: float


@dataclass(frozen=True)
class Decision:
    """The codec of every segment of a group, and what it was decided from."""

    choices: Mapping[Segment, str]
    rows: tuple[Row, ...]
    in_seconds: bool


def gains(
    pieces: Iterable[Piece],
    stats: Mapping[str, ClassStats],
    codecs: Sequence[str],
    itemsize: int,
    costs: Costs | None,
) -> dict[Segment, dict[str, float]]:
    """The gain of each codec for each segment whose class was measured."""
    found = {}
    pieces = list(pieces)
    num_pieces = Counter(piece.segments[0][0].bucket for piece in pieces)
    for piece in pieces:
        for segments in piece.segments:
            for segment in segments:
                if stats.get(segment.kind, ClassStats()).values:
                    pace = num_pieces[segment.bucket]
                    found[segment] = {
                        codec: _gain(segment, piece, stats[segment.kind], codec, itemsize, costs, pace)
                        for codec in codecs
                    }
    return found


def _gain(segment, piece, stats, codec, itemsize, costs, num_pieces) -> float:
    payload = stats.bytes_per_value(codec)
    if costs is None:
        return segment.length * (itemsize - payload)
    share = segment.length / piece.length
    raw = costs.comm(piece.length * itemsize)
    ranks = len(piece.segments)
    coded = costs.coded_time(codec, piece.length, piece.length * payload, ranks, num_pieces)
    return share * (raw - coded)


def choose(
    pieces: Sequence[Piece],
    measured: Mapping[Segment, Mapping[str, float]],
    state_bytes: Mapping[tuple[str, int], int],
    budgets: Sequence[int | None],
    select: bool,
    overhead: float = 0.0,
) -> dict[Segment, str]:
    """The codec of every segment: the best one where it gains, by gain per byte of memory until the budget ends.

    Args:
        pieces: of all buckets of the group.
        measured: from `gains`; a segment without an entry stays raw.
        state_bytes: memory of a codec's state by (codec, values).
        budgets: by rank, bytes; None is no limit.
        select: False compresses what can be, whatever it gains, and keeps only the budget.
        overhead: what a step pays for having anything compressed (the exchange), in the unit of the gains.
    """
    choices = {segment: RAW for piece in pieces for segments in piece.segments for segment in segments}
    candidates = []
    for segment in choices:
        if not measured.get(segment):
            continue
        codec = max(measured[segment], key=measured[segment].get)
        gain = measured[segment][codec]
        if gain > 0 or not select:
            candidates.append(Candidate(segment, codec, gain, state_bytes[codec, segment.length]))
    if select and sum(candidate.gain for candidate in candidates) / len(budgets) <= overhead:
        return choices
    left = list(budgets)
    for candidate in sorted(
        candidates, key=lambda c: (-c.gain / max(1, c.memory), c.segment.owner, c.segment.start)
    ):
        owner = candidate.segment.owner
        if left[owner] is not None:
            if candidate.memory > left[owner]:
                continue
            left[owner] -= candidate.memory
        choices[candidate.segment] = candidate.codec
    return choices


def rows(
    choices: Mapping[Segment, str],
    measured: Mapping[Segment, Mapping[str, float]],
    stats: Mapping[str, ClassStats],
    itemsize: int,
) -> tuple[Row, ...]:
    """The decision table: a row a class, in the order of its values."""
    table = []
    ranks = len({segment.owner for segment in choices})
    for kind in dict.fromkeys(segment.kind for segment in choices):
        members = [segment for segment in choices if segment.kind == kind]
        total = sum(segment.length for segment in members)
        size, gain = 0.0, 0.0
        for segment in members:
            codec = choices[segment]
            size += segment.length * (itemsize if codec == RAW else stats[kind].bytes_per_value(codec))
            gain += 0.0 if codec == RAW else measured[segment][codec]
        used = tuple(sorted({choices[segment] for segment in members} - {RAW}))
        table.append(
            Row(
                kind,
                len(members),
                sum(choices[segment] != RAW for segment in members),
                stats.get(kind, ClassStats()),
                used,
                size / (total * itemsize),
                gain / ranks,
            )
        )
    return tuple(table)


def format_table(name: str, decision: Decision) -> list[str]:
    """The decision as lines of text."""
    unit = "gain us" if decision.in_seconds else "gain KB"
    scale = 1e6 if decision.in_seconds else 1e-3
    lines = [
        f"selection, {name}:",
        f"  {'class':<10} {'segments':>8} {'packed':>8} {'exp changed':>11} {'blocks changed':>14} "
        f"{'ratio':>6} {unit:>10}  codec",
    ]
    for row in decision.rows:
        lines.append(
            f"  {row.kind:<10} {row.segments:>8} {row.compressed:>8} {row.stats.exponent_change_rate:>11.2%} "
            f"{row.stats.block_change_rate:>14.2%} {row.ratio:>6.3f} {row.gain * scale:>10.1f}  "
            f"{', '.join(row.codecs) or 'raw'}"
        )
    return lines


def drifted(
    before: Mapping[str, ClassStats], after: Mapping[str, ClassStats], codecs: Sequence[str], share: float
) -> bool:
    """Whether a class's expected payload moved by more than `share` of what it was with any codec."""
    for kind, stats in after.items():
        if not stats.values or not before.get(kind, ClassStats()).values:
            continue
        for codec in codecs:
            old, new = before[kind].bytes_per_value(codec), stats.bytes_per_value(codec)
            if abs(new - old) > share * old:
                return True
    return False
