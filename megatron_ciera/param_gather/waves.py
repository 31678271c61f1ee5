"""Waves: pieces that are encoded together and whose sizes travel in one exchange, ahead of their gathers.

The first wave of a step is one piece, so that little is encoded before the wire has work. While its payload travels
the next wave is encoded, whatever bucket its pieces are of. At most two waves are encoded and not yet packed, each in
memory of its own: staging does not grow with the model.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron_ciera.param_gather.bucket import GatherBucket, OwnSegment, aligned
from megatron_ciera.param_gather.codec import Codec
from megatron_ciera.param_gather.decider import Decider
from megatron_ciera.param_gather.exchange import Exchange, Ticket, write_damage
from megatron_ciera.param_gather.lanes import Lanes, Mark

NUM_ARENAS = 2
_KEPT_PLANS = 64


class Arena:
    """Memory for the payloads of one wave; uint8 on the device. `packed`: when the wave before has left it."""

    def __init__(self):
        self.buffer: torch.Tensor | None = None
        self.wave: Wave | None = None
        self.packed: Mark | None = None
        self.plans: dict[tuple, Plan] = {}


class Part:
    """Own segments of one codec and their places in an arena, as `encode_many` takes them."""

    def __init__(self, codec: Codec, segments: Sequence[OwnSegment], payloads: Sequence[torch.Tensor]):
        self.codec, self.segments, self.payloads = codec, segments, payloads
        self.words = [own.words for own in segments]
        self.states = [own.state for own in segments]
        self.slots = [own.slot for own in segments]


@dataclass(frozen=True)
class Plan:
    """`decisions`: hash of what is to be gathered and how."""

    parts: Sequence[Part]
    decisions: int


@dataclass(eq=False)
class Wave:
    """Pieces, as (bucket, number of the piece), in the order in which they will be gathered."""

    number: int
    pieces: list[tuple[GatherBucket, int]]
    ticket: Ticket
    probed: bool
    agreed: bool = False

    @property
    def open(self) -> bool:
        """Whether a piece of it is still to be packed."""
        return any(bucket.wave_of.get(piece) is self for bucket, piece in self.pieces)


class Waves:
    """The waves of one shard group. Every method is called on every rank of the group in the same order.

    Args:
        buckets: in the order in which they will be gathered.
        wave_pieces: a wave holds at most as much as so many of the largest pieces.
        codable: whether a bucket's next gather is coded.
        take_counts: is given the counts of the probe of all ranks.
        describe: puts a row of a rank's damage flags into words.
    """

    def __init__(
        self,
        buckets: Sequence[GatherBucket],
        exchange: Exchange,
        lanes: Lanes,
        wave_pieces: int,
        decider: Decider | None,
        codable: Callable[[GatherBucket], bool],
        take_counts: Callable[[torch.Tensor], None],
        describe: Callable[[int, int], str],
    ):
        self._buckets, self._exchange, self._lanes, self._decider = buckets, exchange, lanes, decider
        self._codable, self._take_counts, self._describe = codable, take_counts, describe
        bounds = [bound for bucket in buckets for bound in bucket.bounds]
        self._largest, self._total = max(bounds), sum(bounds)
        self._wave_pieces = wave_pieces
        self._arenas = [Arena() for _ in range(NUM_ARENAS)]
        self._unread: list[Wave] = []
        self._number = 0
        self._step = 0
        self._damage = torch.zeros(2, dtype=torch.int64, device=buckets[0].values.device)

    @property
    def num_bytes(self) -> int:
        """Memory held for outgoing payloads."""
        return sum(arena.buffer.numel() for arena in self._arenas if arena.buffer is not None)

    @property
    def ahead(self) -> bool:
        """Whether encoding the next wave runs beside anything."""
        return self._lanes.encode.aside or self._lanes.encode.device.type == "cpu"

    def step(self, number: int, flags: torch.Tensor) -> None:
        """The optimizer is about to write: earlier waves are void. `flags`: damage flags of all buckets.

        Nothing is being decoded: the caller's current stream has waited for that.
        """
        self._number, self._step = 0, number
        if self.num_bytes:  # something was coded once
            write_damage(self._damage, flags)
        for arena in self._arenas:
            arena.wave = None

    def start_step(self, first: GatherBucket | None = None) -> None:
        """The step's first wave, of `first` before others, or the counts of the probe alone.

        Encoding begins after what the caller's current stream holds now.
        """
        if self._number == 0:
            self._lanes.encode.after_compute()
            self._start(first)

    def need(self, bucket: GatherBucket, piece: int) -> None:
        """After this a piece is encoded and every rank knows its sizes. NOTE: waits on the host for the exchange."""
        if piece not in bucket.wave_of:
            if self._free_arena() is None:
                self._give_up()
            self._start(bucket)
        self.agree(bucket.wave_of[piece])

    def packed(self, bucket: GatherBucket, piece: int) -> None:
        """A piece's payload was copied out in the gather lane."""
        wave = bucket.wave_of.pop(piece)
        for arena in self._arenas:
            if arena.wave is wave and not wave.open:
                arena.wave, arena.packed = None, self._lanes.gather.mark()

    def agree(self, until: Wave | None = None) -> None:
        """Takes in the exchanges up to that of a wave, or all. NOTE: device-to-host synchronisation."""
        while self._unread and not (until and until.agreed):
            wave = self._unread.pop(0)
            wave.agreed = True
            sizes, counts = self._exchange.result(wave.ticket, self._describe)
            for bucket, piece in wave.pieces:
                bucket.agree(piece, sizes)
            if wave.probed:
                self._take_counts(counts)

    def start_next(self) -> None:
        """Encodes a wave ahead, if there is room and something to encode.

        To be called when a piece was put on the wire: the host takes longer to start a wave than the device to encode
        a short one, and the first piece must not wait for that.
        """
        if self.ahead and self._free_arena() is not None and next(self._upcoming(None), None):
            self._start(None)

    def _free_arena(self) -> Arena | None:
        return next((arena for arena in self._arenas if arena.wave is None or not arena.wave.open), None)

    def _give_up(self) -> None:
        """Makes room: the newest wave's buckets are not gathered in the expected order. It is encoded again later."""
        self.agree()
        newest = max(self._arenas, key=lambda arena: arena.wave.number)
        for bucket, piece in newest.wave.pieces:
            if bucket.wave_of.get(piece) is newest.wave:
                del bucket.wave_of[piece]
                bucket.waiting.add(piece)
        newest.wave, newest.packed = None, self._lanes.gather.mark()

    def _upcoming(self, first: GatherBucket | None) -> Iterator[tuple[GatherBucket, int]]:
        """Pieces to be encoded next, those of `first` before others."""
        for bucket in [first, *(b for b in self._buckets if b is not first)] if first else self._buckets:
            if bucket.waiting and (bucket.sending or self._codable(bucket)):
                for piece in sorted(bucket.waiting):
                    yield bucket, piece

    def _take(self, first: GatherBucket | None) -> list[tuple[GatherBucket, int]]:
        limit = min(1 << self._number, self._wave_pieces) * self._largest
        taken, total = [], 0
        for bucket, piece in self._upcoming(first):
            total += bucket.bounds[piece]
            if taken and total > limit:
                break
            taken.append((bucket, piece))
        return taken

    def _start(self, first: GatherBucket | None) -> None:
        """Encodes a wave and starts its exchange; without pieces the exchange carries the probe alone."""
        if len(self._unread) == NUM_ARENAS:
            self.agree(self._unread[0])
        lane, arena = self._lanes.encode, self._free_arena()
        if arena.packed is not None:
            lane.hold(arena.packed)
        with lane.enter():
            begin = lane.watch.begin()
            ticket = self._exchange.open()
            probed = self._decider is not None and self._decider.due
            if probed:
                self._decider.write(self._exchange.counts(ticket))
            wave = Wave(self._number, self._take(first), ticket, probed)
            plan = self._plan(wave.pieces, arena)
            for part in plan.parts:
                self._encode(part, ticket)
            lane.watch.end("encode", begin)
            # Damage is told once a step: what a later wave would find, the next step tells.
            damage = self._damage if self._number == 0 else None
            self._exchange.start(ticket, self._step, plan.decisions, damage)
        for bucket, piece in wave.pieces:
            arena.wave = wave
            bucket.waiting.discard(piece)
            bucket.wave_of[piece] = wave
        self._number += 1
        self._unread.append(wave)

    def _encode(self, part: Part, ticket: Ticket) -> None:
        for own, payload in zip(part.segments, part.payloads, strict=True):
            own.payload = payload
        sizes = self._exchange.sizes(ticket, range(part.slots[0], part.slots[-1] + 1))
        in_a_row = sizes.numel() == len(part.slots)
        if not in_a_row:
            sizes = torch.zeros(len(part.slots), dtype=torch.int64, device=sizes.device)
        part.codec.encode_many(part.words, part.states, part.payloads, sizes)
        if not in_a_row:
            self._exchange.fill(ticket, part.slots, sizes)

    def _plan(self, pieces: Sequence[tuple[GatherBucket, int]], arena: Arena) -> Plan:
        """What encoding these pieces into this arena takes; kept, since most steps are like the one before."""
        key = tuple((bucket.index, piece, bucket.version) for bucket, piece in pieces)
        if key not in arena.plans:
            if len(arena.plans) >= _KEPT_PLANS:
                arena.plans.clear()
            arena.plans[key] = self._new_plan(pieces, arena)
        return arena.plans[key]

    def _new_plan(self, pieces: Sequence[tuple[GatherBucket, int]], arena: Arena) -> Plan:
        if pieces and arena.buffer is None:
            size = min(self._total, self._wave_pieces * self._largest)
            arena.buffer = torch.empty(size, dtype=torch.uint8, device=self._lanes.encode.device)
        offset, by_codec = 0, {}
        for bucket, piece in pieces:
            for own in bucket.to_encode(piece):
                bound = aligned(bucket.codecs[own.codec].bound(own.words.numel()))
                payload = arena.buffer[offset : offset + bound]
                offset += bound
                by_codec.setdefault(own.codec, []).append((own, payload))
        codecs = self._buckets[0].codecs
        parts = [Part(codecs[codec], *zip(*segments, strict=True)) for codec, segments in by_codec.items()]
        return Plan(parts, self._decisions(pieces))

    def _decisions(self, pieces: Sequence[tuple[GatherBucket, int]]) -> int:
        """A hash of what is about to be gathered and how; equal on all ranks of the group."""
        text = b"".join(bucket.name.encode() + bucket.digest + piece.to_bytes(4) for bucket, piece in pieces)
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
