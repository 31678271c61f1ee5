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
from megatron_ciera.param_gather.decider import Decider
from megatron_ciera.param_gather.exchange import Exchange, Ticket, write_damage
from megatron_ciera.param_gather.lanes import Lanes, Mark

NUM_ARENAS = 2


class Arena:
    """Memory for the payloads of one wave; uint8 on the device. `packed`: when the wave before has left it."""

    def __init__(self):
        self.buffer: torch.Tensor | None = None
        self.wave: Wave | None = None
        self.packed: Mark | None = None


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
        """The step's first wave, of `first` before others, and the next: encoding begins after what the caller's
        current stream holds now. Without anything to encode the counts of the probe are sent alone."""
        if self._number == 0:
            self._lanes.encode.after_compute()
            self._start(first)
            self._start_next()

    def need(self, bucket: GatherBucket, piece: int) -> None:
        """After this a piece is encoded and every rank knows its sizes. NOTE: waits on the host for the exchange."""
        if piece not in bucket.wave_of:
            if self._free_arena() is None:
                self._give_up()
            self._start(bucket)
        self._start_next()
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

    def _start_next(self) -> None:
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
            self._encode(wave, arena)
            lane.watch.end("encode", begin)
            # Damage is told once a step: what a later wave would find, the next step tells.
            damage = self._damage if self._number == 0 else None
            self._exchange.start(ticket, self._step, self._decisions(wave), damage)
        self._number += 1
        self._unread.append(wave)

    def _encode(self, wave: Wave, arena: Arena) -> None:
        if not wave.pieces:
            return
        if arena.buffer is None:
            size = min(self._total, self._wave_pieces * self._largest)
            arena.buffer = torch.empty(size, dtype=torch.uint8, device=self._lanes.encode.device)
        arena.wave = wave
        offset = 0
        by_codec: dict[str, list[OwnSegment]] = {}
        for bucket, piece in wave.pieces:
            bucket.waiting.discard(piece)
            bucket.wave_of[piece] = wave
            for own in bucket.to_encode(piece):
                bound = aligned(bucket.codecs[own.codec].bound(own.words.numel()))
                own.payload = arena.buffer[offset : offset + bound]
                offset += bound
                by_codec.setdefault(own.codec, []).append(own)
        codecs = wave.pieces[0][0].codecs
        for codec, segments in by_codec.items():
            slots = [own.slot for own in segments]
            sizes = self._exchange.sizes(wave.ticket, range(slots[0], slots[-1] + 1))
            # Kernels are built for pointers to 16 bytes; other places and orders take two launches more.
            straight = sizes.numel() == len(slots) and sizes.data_ptr() % 16 == 0
            if not straight:
                sizes = torch.zeros(len(slots), dtype=torch.int64, device=arena.buffer.device)
            codecs[codec].encode_many(
                [own.words for own in segments],
                [own.state for own in segments],
                [own.payload for own in segments],
                sizes,
            )
            if not straight:
                self._exchange.fill(wave.ticket, slots, sizes)

    def _decisions(self, wave: Wave) -> int:
        """A hash of what is about to be gathered and how; equal on all ranks of the group."""
        text = b"".join(
            bucket.name.encode() + bucket.digest + piece.to_bytes(4) for bucket, piece in wave.pieces
        )
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
