"""All buckets that one process group shares and one optimizer steps: when they are encoded, exchanged, gathered."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ciera.param_gather.bucket import GatherBucket, aligned
from megatron_ciera.param_gather.codec import as_words
from megatron_ciera.param_gather.decider import Decider
from megatron_ciera.param_gather.errors import REMEDY, ParamGatherError
from megatron_ciera.param_gather.exchange import Exchange
from megatron_ciera.param_gather.lanes import Lane
from megatron_ciera.param_gather.ledger import Ledger
from megatron_ciera.param_gather.selection import Decision
from megatron_ciera.param_gather.transfer import (
    GatherHandle,
    Nothing,
    PayloadTransfer,
    RawTransfer,
    Ring,
)


@dataclass(frozen=True)
class Tuning:
    """Sizes that bound the staging memory; docs/param_gather.md states the sum.

    piece_bytes: raw bytes of one piece over all ranks.
    num_slots: pieces in flight or undecoded.
    wave_buckets: buckets' worth of own payloads that are encoded ahead.
    """

    piece_bytes: int = 128 << 20
    num_slots: int = 2
    wave_buckets: int = 2


@dataclass
class Round:
    """The step that chained optimizers are in: each of them steps once in it, one after the other."""

    steps: int = 0


class ShardGroup:
    """Gathers its buckets; every method is called on every rank of the group in the same order.

    Args:
        name: for messages.
        group: Megatron's process group of these buckets; carries what replaces Megatron's own gathers.
        buckets: of one dtype, in the order in which they will be gathered.
        exchange: on a process group of its own.
        warmup_steps: gathers after so many optimizer steps are raw; at least the first.
        round_: shared by all groups of this rank.
        decider: sets the buckets' codecs; without one they stay as they are.
    """

    def __init__(
        self,
        name: str,
        group,
        buckets: Sequence[GatherBucket],
        exchange: Exchange,
        ring: Ring,
        lane: Lane,
        ledger: Ledger,
        warmup_steps: int,
        tuning: Tuning,
        round_: Round,
        decider: Decider | None = None,
    ):
        self.name, self.buckets, self.ledger = name, list(buckets), ledger
        self._group, self._exchange, self._ring, self._lane = group, exchange, ring, lane
        self._size = torch.distributed.get_world_size(group)
        self._rank = torch.distributed.get_rank(group)
        self._warmup_steps = max(1, warmup_steps)
        self._tuning, self._round, self._decider = tuning, round_, decider
        self._decided: set[str] = set()  # buckets that have the latest decision
        self._announced = False
        self.steps = 0
        self.verify = False  # gather coded buckets raw as well, and compare
        self._wave: list[GatherBucket] = []
        self._exchanged = True
        self._measured = False
        self._arena = torch.empty(0, dtype=torch.uint8, device=buckets[0].values.device)
        self._flags = _join_flags(self.buckets)

    @property
    def warming_up(self) -> bool:
        """Whether the gather after the latest step is one of the warm-up."""
        return self.steps <= self._warmup_steps

    @property
    def decision(self) -> Decision | None:
        """The latest decision, with the change rates that it was made from; None before the first."""
        return self._decider.decision if self._decider is not None else None

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held on this rank: codec states, and staging for outgoing payloads."""
        return {"state": sum(b.state_bytes for b in self.buckets), "staging": self._arena.numel()}

    def stepped(self) -> None:
        """The optimizer is about to write new values into the own shards."""
        self._agree()
        self._lane.release_parameters()
        self.steps += 1
        if self._decider is not None:
            self._decider.before_step(self.steps)
        self._round.steps = max(self._round.steps, self.steps)
        for bucket in self.buckets:
            bucket.stepped = bucket.pending = True
            bucket.encoded = False
        self._wave = []

    def forget(self) -> None:
        """Words were changed outside the optimizer: the next gathers are raw."""
        for bucket in self.buckets:
            bucket.forget()

    def encode_ahead(self) -> None:
        """Encodes as many pending buckets as staging allows and sends their sizes, beside what runs now."""
        first = next((bucket for bucket in self.buckets if self._is_codable(bucket)), None)
        if first is not None or self._probing:
            self._encode_wave(first)

    def gather(self, bucket: GatherBucket) -> GatherHandle | Nothing:
        """Starts the gather of `bucket`; returns what has to be waited for. Never waits for payloads on a GPU.

        Raises:
            ParamGatherError: on all ranks of the group, before anything is sent, if ranks differ or data is damaged.
        """
        # Chained optimizers gather everything after each one's step: what is still to be stepped waits for its own.
        if not bucket.pending or self.steps < self._round.steps:
            self.ledger.add("unchanged", 1)
            return Nothing()
        if bucket.stepped:
            self.ledger.received("bytes_raw", self._size, bucket.shard_bytes)
        if self._stays_plain(bucket):
            return self._plain(bucket)
        self._lane.after_compute()
        coded = self._is_codable(bucket)
        if (coded and not bucket.encoded) or self._probing:
            self._encode_wave(bucket if coded else None)
        if coded or self.warming_up:
            self._agree()
        if coded:
            coded = bucket.payload_bytes < bucket.shard_bytes
            if not coded:
                self._fallback("incompressible")
        elif bucket.compressible and not self.warming_up:
            self._fallback("invalidated")
        bucket.pending = bucket.stepped = bucket.encoded = False
        return self._coded(bucket) if coded else self._raw(bucket)

    def _stays_plain(self, bucket: GatherBucket) -> bool:
        """Whether selection left all of the bucket raw and there is nothing to measure or to take over."""
        decided = self._decider is None or bucket.name in self._decided
        return decided and not bucket.compressible and not self._probing and not self.warming_up

    def _plain(self, bucket: GatherBucket):
        """Megatron's own gather, on the caller's stream: a link that is fast enough must not pay for us."""
        self.ledger.received("bytes_sent", self._size, bucket.shard_bytes)
        self.ledger.add("raw_gathers", 1)
        bucket.pending = bucket.stepped = False
        bucket.base_known = True
        return torch.distributed.all_gather_into_tensor(
            bucket.values, bucket.own_shard, group=self._group, async_op=True
        )

    def _is_codable(self, bucket: GatherBucket) -> bool:
        return bucket.pending and bucket.base_known and bucket.compressible and not self.warming_up

    @property
    def _probing(self) -> bool:
        """Whether the latest step is still to be measured. (During the warm-up this alone starts an exchange.)"""
        return self._decider is not None and self._decider.due

    def _fallback(self, reason: str) -> None:
        if self._rank == 0:
            self.ledger.add(f"raw_fallbacks/{reason}", 1)

    def _encode_wave(self, first: GatherBucket | None) -> None:
        """Encodes `first` and the next buckets of the order that are due and fit, then starts the exchange.

        None: nothing is due, and the exchange carries the probe alone.
        """
        self._agree()
        for bucket in self._wave:
            bucket.encoded = False  # if its turn has passed ungathered: encoded again with the next wave
        limit = self._tuning.wave_buckets * max(b.words.nbytes for b in self.buckets)
        self._wave, total = [], 0
        for bucket in [first, *(b for b in self.buckets if b is not first)] if first else []:
            need = self._payload_bound(bucket)
            if self._is_codable(bucket) and (not self._wave or total + need <= limit):
                self._wave.append(bucket)
                total += need
        self._lane.after_compute()
        with self._lane.enter():
            begin = self._lane.watch.begin()
            self._encode(total)
            self._lane.watch.end("encode", begin)
            self._exchange.start(self.steps, self._decisions(), self._flags)
        self._exchanged = False

    def _encode(self, total: int) -> None:
        if self._arena.numel() < total:
            self._arena = torch.empty(total, dtype=torch.uint8, device=self._arena.device)
        self._exchange.clear()
        if self._probing:
            self._decider.write(self._exchange.counts)
            self._measured = True
        offset, by_codec = 0, {}
        codecs = self.buckets[0].codecs
        for bucket in self._wave:
            for own in bucket.to_encode():
                bound = aligned(bucket.codecs[own.codec].bound(own.words.numel()))
                own.payload = self._arena[offset : offset + bound]
                offset += bound
                by_codec.setdefault(own.codec, []).append(own)
            bucket.encoded = True
        for codec, segments in by_codec.items():
            sizes = torch.zeros(len(segments), dtype=torch.int64, device=self._arena.device)
            codecs[codec].encode_many(
                [own.words for own in segments],
                [own.state for own in segments],
                [own.payload for own in segments],
                sizes,
            )
            self._exchange.fill([own.slot for own in segments], sizes)

    def _payload_bound(self, bucket: GatherBucket) -> int:
        return sum(aligned(bucket.codecs[own.codec].bound(own.words.numel())) for own in bucket.to_encode())

    def _decisions(self) -> int:
        """A hash of what is about to be gathered and how; equal on all ranks of the group."""
        text = b"".join(bucket.name.encode() + bucket.digest for bucket in self._wave)
        return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")

    def _agree(self) -> None:
        """Takes in the exchange of the current wave, once. NOTE: device-to-host synchronisation."""
        if self._exchanged:
            return
        self._exchanged = True
        sizes, counts = self._exchange.result(self.place)
        for bucket in self._wave:
            bucket.agree(sizes)
        if self._measured:
            self._measured = False
            if self._decider.take(counts, self.warming_up):
                self._decided.clear()
                self._announced = False
            if self.steps >= self._warmup_steps and not self._announced:
                self._announced = True
                self._decider.announce()

    def place(self, reader: int, row: int) -> str:
        """In words, the bucket and segment of row `row` of the damage flags of rank `reader` of the group."""
        for bucket in self.buckets:
            if row < bucket.num_rows(reader):
                return bucket.place(reader, row)
            row -= bucket.num_rows(reader)
        return self.name

    def check_damage(self) -> None:
        """Raises ParamGatherError on all ranks of the group if any decoded a damaged block. NOTE: synchronises."""
        self._exchange.check_damage(self._flags, self.place)

    @property
    def flags(self) -> torch.Tensor:
        """Damage flags of all buckets, int32 `[rows, 2]` on the device."""
        return self._flags

    def _raw(self, bucket: GatherBucket) -> GatherHandle:
        self.ledger.received("bytes_sent", self._size, bucket.shard_bytes)
        self.ledger.add("raw_gathers", 1)
        transfer = RawTransfer(self._lane, self._group, bucket.values, bucket.own_shard)
        return GatherHandle(self._lane, [transfer], 1, lambda: self._gathered_raw(bucket))

    def _gathered_raw(self, bucket: GatherBucket) -> None:
        if self.steps >= self._warmup_steps:
            self._adopt(bucket)

    def _gathered_coded(self, bucket: GatherBucket) -> None:
        if self.verify:
            verify_bucket(bucket, self._group, self.ledger)
        self._adopt(bucket)

    def _adopt(self, bucket: GatherBucket) -> None:
        """Every rank holds these words now: the moment for states, and for codecs that were decided anew."""
        if self._decider is not None and self._decider.decision and bucket.name not in self._decided:
            self._decided.add(bucket.name)
            bucket.choose(self._decider.decision.choices.__getitem__)
        bucket.adopt()

    def _coded(self, bucket: GatherBucket) -> GatherHandle:
        transfers = []
        for index, sizes in enumerate(bucket.sizes):
            self.ledger.received("bytes_sent", self._size, sizes.padded)
            self.ledger.received("bytes_payload_mean", self._size, sizes.mean)
            transfers.append(
                PayloadTransfer(
                    self._lane,
                    self._ring,
                    self._group,
                    sizes.padded,
                    lambda region, index=index: bucket.pack(index, region),
                    lambda received, index=index: bucket.unpack(index, received),
                )
            )
        self.ledger.add("coded_gathers", 1)
        window = self._ring.num_slots if self._lane.aside or self._lane.device.type == "cpu" else 1
        return GatherHandle(self._lane, transfers, window, lambda: self._gathered_coded(bucket))


def verify_bucket(bucket: GatherBucket, group, ledger: Ledger) -> None:
    """Gathers the own shards raw, beside the bucket, and compares bits. NOTE: synchronises; needs a bucket of memory.

    Raises:
        ParamGatherError: on every rank of the group if any holds other bits than a shard's owner.
    """
    expected = torch.empty_like(bucket.words)
    own = as_words(bucket.own_shard)
    # As bytes: neither gloo nor NCCL gathers int16.
    torch.distributed.all_gather_into_tensor(expected.view(torch.uint8), own.view(torch.uint8), group=group)
    ledger.received("bytes_sent", bucket.size, bucket.shard_bytes)
    different = (expected != bucket.words).view(bucket.size, -1).sum(dim=1)
    torch.distributed.all_reduce(different, group=group)
    counts = different.tolist()
    if any(counts):
        raise ParamGatherError(
            f"--ciera-verify-interval: {bucket.name} differs from a raw gather: "
            + ", ".join(
                f"{count} values of rank {rank}'s shard" for rank, count in enumerate(counts) if count
            )
            + f" (summed over the receivers). {REMEDY}"
        )


def _join_flags(buckets: Sequence[GatherBucket]) -> torch.Tensor:
    """One tensor that holds all buckets' flags, which become views of it."""
    joined = torch.cat([bucket.flags for bucket in buckets])
    row = 0
    for bucket in buckets:
        rows = bucket.flags.size(0)
        bucket.flags = joined[row : row + rows]
        row += rows
    return joined
