"""One bucket of the distributed optimizer: its words, its segments, and the codec states of the own shard."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ciera.param_gather.codec import Codec, as_words, new_flags
from megatron_ciera.param_gather.layout import ClassRun, Piece, Segment, cut_bucket

RAW = ""  # the codec of a segment that is sent as it is
_ALIGN = 16


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to what payloads in a row are aligned to."""
    return -(-num_bytes // _ALIGN) * _ALIGN


@dataclass
class OwnSegment:
    """A segment of the own shard. `slot` is its place in the size exchange; `state` what its codec keeps."""

    slot: int
    piece: int
    segment: Segment
    words: torch.Tensor
    codec: str = RAW
    state: torch.Tensor | None = None
    payload: torch.Tensor | None = None


@dataclass(frozen=True)
class PieceSizes:
    """Bytes of each segment's payload by rank, each aligned, and what every rank's payload is padded to.

    `raw`: coded it would have been no smaller, so all of it travels as it is.
    """

    by_owner: tuple[tuple[int, ...], ...]
    padded: int
    raw: bool

    @property
    def mean(self) -> float:
        return sum(map(sum, self.by_owner)) / len(self.by_owner)


class GatherBucket:
    """A bucket's parameters as words, cut the same way on every rank.

    Args:
        name: for messages.
        index: number of the bucket in its group.
        values: `bucket.param_data`: 1-D, all ranks' shards one after the other.
        rank, size: of the process group that shares it.
        runs: where which class of parameters lies.
        codecs: by name; `encode_many` and `decode_apply_many` are called with this bucket's segments.
        piece_values: upper limit of values a rank puts on the wire at once.
        first_slot: number of slots that earlier buckets take in the size exchange.
    """

    def __init__(
        self,
        name: str,
        index: int,
        values: torch.Tensor,
        rank: int,
        size: int,
        runs: Sequence[ClassRun],
        codecs: dict[str, Codec],
        piece_values: int,
        first_slot: int,
    ):
        self.name, self.index, self.codecs = name, index, codecs
        self.values, self.rank, self.size = values, rank, size
        self.words = as_words(values)
        self.shard_values = values.numel() // size
        self.own_shard = values[rank * self.shard_values : (rank + 1) * self.shard_values]
        self.pieces: tuple[Piece, ...] = cut_bucket(values.numel(), size, runs, piece_values, index)
        self.first_slot = first_slot
        self.num_slots = max(sum(len(piece.segments[r]) for piece in self.pieces) for r in range(size))
        self.own = list(self._own_segments())
        self._choices = {
            segment: RAW for piece in self.pieces for segments in piece.segments for segment in segments
        }
        self._words = {segment: self.segment_words(segment) for segment in self._choices}
        self._of_piece = [
            [own for own in self.own if own.piece == index] for index in range(len(self.pieces))
        ]
        self._rows = _first_rows([len(self._foreign(piece, rank)) for piece in self.pieces])
        self._slots = [
            _first_rows([len(piece.segments[owner]) for piece in self.pieces]) for owner in range(size)
        ]
        # Bytes that hold the own payloads of each piece, whatever codecs its segments have.
        self.bounds = [
            sum(max(aligned(c.bound(own.words.numel())) for c in codecs.values()) for own in part)
            for part in self._of_piece
        ]
        self.version = 0  # changes with codecs and states
        self._take_digest()
        self.flags = new_flags(self.num_rows(rank), values.device)
        self.stepped = False  # an optimizer step since the last gather
        self.pending = True  # the next gather has something to do
        self.base_known = False  # receivers hold what `state` was made from
        self.sending = False  # a coded gather has begun, and `adopt` has not been called for it
        self._forgotten = False  # while it was under way
        self.waiting: set[int] = set()  # pieces of this step that are in no wave
        self.wave_of: dict[int, object] = {}  # the wave of each piece that is encoded and not packed
        self.sizes: list[PieceSizes | None] = [None] * len(self.pieces)

    @property
    def shard_bytes(self) -> int:
        return self.shard_values * self.values.element_size()

    @property
    def state_bytes(self) -> int:
        """Memory held by codec states now."""
        return sum(own.state.nbytes for own in self.own if own.state is not None)

    def segment_words(self, segment: Segment) -> torch.Tensor:
        """The words of a segment, a view."""
        start = segment.owner * self.shard_values + segment.start
        return self.words[start : start + segment.length]

    def choose(self, choice: Callable[[Segment], str]) -> None:
        """Sets each segment's codec, for all ranks; `choice` returns a name in `codecs` or RAW.

        A state that its codec does not need any more is dropped; missing ones are made by the next `adopt`.
        """
        for segment in self._choices:
            self._choices[segment] = choice(segment)
        self.version += 1
        self._take_digest()
        for own in self.own:
            codec = self._choices[own.segment]
            if codec != own.codec:
                own.codec, own.state = codec, None

    def _take_digest(self) -> None:
        """A hash of all ranks' choices, in order."""
        self.digest = hashlib.sha256(",".join(self._choices.values()).encode()).digest()
        self.compressible = any(self._choices.values())

    def step(self) -> None:
        """The own shard is about to get new values: all of it is to be encoded and gathered."""
        self.stepped = self.pending = True
        self.sending = False
        self.waiting, self.wave_of = set(range(len(self.pieces))), {}

    def forget(self) -> None:
        """The receivers' words may differ from the states: the next gather is raw."""
        self.base_known, self.pending, self._forgotten = False, True, self.sending
        if not self.sending:
            self.waiting, self.wave_of = set(), {}

    def adopt(self) -> None:
        """Brings the states to the words as they are. Call in the lane, when every rank holds these words."""
        self.sending = False
        if self._forgotten:  # words were rewritten while this gather was under way: it proves nothing
            self._forgotten = False
            return
        for own in self.own:
            if own.codec == RAW:
                continue
            if own.state is None:
                self.version += 1
                own.state = self.codecs[own.codec].new_state(own.words)
            else:
                self.codecs[own.codec].update_state(own.words, own.state)
        self.base_known = True

    def to_encode(self, piece_index: int) -> list[OwnSegment]:
        """The own segments of a piece that have a codec."""
        return [own for own in self._of_piece[piece_index] if own.codec != RAW]

    def agree(self, piece_index: int, table: Sequence[Sequence[int]]) -> None:
        """Takes in the exchanged sizes of a piece: bytes by rank and slot of the group."""
        piece, itemsize = self.pieces[piece_index], self.values.element_size()
        by_owner, raw = [], []
        for owner, segments in enumerate(piece.segments):
            slot = self.first_slot + self._slots[owner][piece_index]
            raw.append(tuple(aligned(segment.length * itemsize) for segment in segments))
            by_owner.append(
                tuple(
                    as_is if self._choices[segment] == RAW else aligned(table[owner][slot + index])
                    for index, (segment, as_is) in enumerate(zip(segments, raw[-1], strict=True))
                )
            )
        padded, most = max(map(sum, by_owner)), max(map(sum, raw))
        if padded < piece.length * itemsize:
            self.sizes[piece_index] = PieceSizes(tuple(by_owner), padded, False)
        else:
            self.sizes[piece_index] = PieceSizes(tuple(raw), most, True)

    def pack(self, piece_index: int, region: torch.Tensor) -> None:
        """Writes the own payload of a piece into `region` (uint8): segments as encoded, raw ones as they are."""
        offset, sources, targets = 0, [], []
        sizes = self.sizes[piece_index]
        for own, num_bytes in zip(self._of_piece[piece_index], sizes.by_owner[self.rank], strict=True):
            place = region[offset : offset + num_bytes]
            offset += num_bytes
            if sizes.raw or own.codec == RAW:
                place[: own.words.nbytes].copy_(own.words.view(torch.uint8))
            else:
                sources.append(own.payload[:num_bytes].view(torch.int64))
                targets.append(place.view(torch.int64))
        if sources:
            torch._foreach_copy_(targets, sources)

    def unpack(self, piece_index: int, received: torch.Tensor) -> None:
        """Applies the other ranks' payloads, uint8 `[ranks × padded]`, to their shards, in place.

        Blocks that do not fit their hash stay as they were and are counted in `flags`.
        """
        piece, sizes = self.pieces[piece_index], self.sizes[piece_index]
        work: dict[str, tuple[list, list]] = {}
        for owner, segments in enumerate(piece.segments):
            if owner == self.rank:
                continue
            offset = owner * sizes.padded
            for segment, num_bytes in zip(segments, sizes.by_owner[owner], strict=True):
                codec = RAW if sizes.raw else self._choices[segment]
                payloads, targets = work.setdefault(codec, ([], []))
                payloads.append(received[offset : offset + num_bytes])
                targets.append(self._words[segment])
                offset += num_bytes
        for payload, words in zip(*work.pop(RAW, ([], [])), strict=True):
            words.view(torch.uint8).copy_(payload[: words.nbytes])
        row = self._rows[piece_index]
        for codec in sorted(work):
            payloads, targets = work[codec]
            flags = self.flags[row : row + len(targets)]
            self.codecs[codec].decode_apply_many(payloads, targets, flags)
            row += len(targets)

    def num_rows(self, reader: int) -> int:
        """Rows of `flags` on rank `reader`: one for each segment of the others."""
        return sum(len(self._foreign(piece, reader)) for piece in self.pieces)

    def place(self, reader: int, row: int) -> str:
        """In words, what row `row` of `flags` counts on rank `reader`."""
        for piece in self.pieces:
            foreign = self._foreign(piece, reader)
            if row < len(foreign):
                # In the order of `unpack`: codec by codec; rows of raw segments come last and stay empty.
                segment = sorted(foreign, key=lambda s: (self._choices[s] == RAW, self._choices[s]))[row]
                return (
                    f"{self.name}, {segment.kind} values from {segment.start} of rank {segment.owner}'s shard"
                )
            row -= len(foreign)
        return self.name

    def _own_segments(self) -> Iterator[OwnSegment]:
        slot = self.first_slot
        for index, piece in enumerate(self.pieces):
            for segment in piece.segments[self.rank]:
                yield OwnSegment(slot, index, segment, self.segment_words(segment))
                slot += 1

    def _foreign(self, piece: Piece, reader: int) -> list[Segment]:
        return [s for owner, segments in enumerate(piece.segments) if owner != reader for s in segments]


def _first_rows(counts: list[int]) -> list[int]:
    return [sum(counts[:index]) for index in range(len(counts))]
