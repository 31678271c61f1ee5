"""All buckets that one process group shares and one optimizer steps: when they are encoded, exchanged, gathered."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ciera.param_gather.bucket import GatherBucket
from megatron_ciera.param_gather.codec import as_words
from megatron_ciera.param_gather.decider import Decider
from megatron_ciera.param_gather.errors import REMEDY, ParamGatherError
from megatron_ciera.param_gather.exchange import Exchange
from megatron_ciera.param_gather.lanes import Lanes
from megatron_ciera.param_gather.ledger import Ledger
from megatron_ciera.param_gather.selection import Decision
from megatron_ciera.param_gather.transfer import (
    GatherHandle,
    Nothing,
    PayloadTransfer,
    RawTransfer,
    Ring,
)
from megatron_ciera.param_gather.waves import Waves


@dataclass(frozen=True)
class Tuning:
    """Sizes that bound the staging memory; docs/param_gather.md states the sum.

    piece_bytes: raw bytes of one piece over all ranks, at most.
    num_slots: pieces in flight or undecoded.
    wave_pieces: pieces' worth of own payloads that are encoded together, at most.
    """

    piece_bytes: int = 256 << 20
    num_slots: int = 2
    wave_pieces: int = 2


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
        lanes: Lanes,
        ledger: Ledger,
        warmup_steps: int,
        tuning: Tuning,
        round_: Round,
        decider: Decider | None = None,
    ):
        self.name, self.buckets, self.ledger = name, list(buckets), ledger
        self._group, self._exchange, self._ring = group, exchange, ring
        self._lanes, self._lane = lanes, lanes.gather
        self._size = torch.distributed.get_world_size(group)
        self._rank = torch.distributed.get_rank(group)
        self._warmup_steps = max(1, warmup_steps)
        self._round, self._decider = round_, decider
        self._decided: set[str] = set()  # buckets that have the latest decision
        self._announced = False
        self.steps = 0
        self.verify = False  # gather coded buckets raw as well, and compare
        self._flags = _join_flags(self.buckets)
        self._waves = Waves(
            self.buckets,
            exchange,
            lanes,
            tuning.wave_pieces,
            decider,
            self._is_codable,
            self._take_counts,
            self.place,
        )

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
        """Bytes held on this rank: codec states, and staging for outgoing payloads and samples."""
        probes = self._decider.probe.num_bytes if self._decider is not None else 0
        return {"state": sum(b.state_bytes for b in self.buckets), "staging": self._waves.num_bytes + probes}

    def stepped(self) -> None:
        """The optimizer is about to write new values into the own shards."""
        self._waves.agree()
        self._lanes.release_parameters()
        self.steps += 1
        self._lane.watch.step(self.steps)
        if self._decider is not None:
            self._decider.before_step(self.steps)
        self._round.steps = max(self._round.steps, self.steps)
        for bucket in self.buckets:
            bucket.step()
        self._waves.step(self.steps, self._flags)

    def forget(self) -> None:
        """Words were changed outside the optimizer: the next gathers are raw."""
        for bucket in self.buckets:
            bucket.forget()

    def encode_ahead(self) -> None:
        """Encodes what is gathered first and sends its sizes, beside what runs now."""
        if self._probing or any(self._is_codable(bucket) for bucket in self.buckets):
            self._waves.start_step()
            self._waves.start_next()

    def gather(self, bucket: GatherBucket) -> GatherHandle | Nothing:
        """Starts the gather of `bucket`; returns what has to be waited for. Never waits for payloads on a GPU.

        Raises:
            ParamGatherError: on all ranks of the group, before a payload of the wave is sent, if ranks differ or data
                is damaged.
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
        if coded or self._probing:
            self._waves.start_step(bucket if coded else None)
        if self.warming_up:
            self._waves.agree()
        if not coded:
            if bucket.compressible and not self.warming_up:
                self._fallback("invalidated")
            bucket.waiting.clear()
        bucket.pending, bucket.stepped, bucket.sending = False, False, True
        return self._coded(bucket) if coded else self._raw(bucket)

    def _stays_plain(self, bucket: GatherBucket) -> bool:
        """Whether selection left all of the bucket raw and there is nothing to measure or to take over."""
        decided = self._decider is None or bucket.name in self._decided
        return decided and not bucket.compressible and not self._probing and not self.warming_up

    def _plain(self, bucket: GatherBucket):
        """Megatron's own gather, on the caller's stream: a link that is fast enough must not pay for us."""
        self._count_raw(bucket)
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

    def _take_counts(self, counts: torch.Tensor) -> None:
        """Decides, from the counts of the probe of all ranks."""
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

    def _raw(self, bucket: GatherBucket) -> GatherHandle:
        self._count_raw(bucket)
        transfer = RawTransfer(self._lane, self._group, bucket.values, bucket.own_shard)
        return GatherHandle(self._lane, [transfer], 1, lambda: self._gathered_raw(bucket))

    def _count_raw(self, bucket: GatherBucket) -> None:
        self.ledger.received("bytes_sent", self._size, bucket.shard_bytes)
        self.ledger.add("raw_gathers", 1)
        if self.warming_up:
            self.ledger.add("raw_gathers/warm_up", 1)
        elif not bucket.compressible:
            self.ledger.add("raw_gathers/selection", 1)

    def _gathered_raw(self, bucket: GatherBucket) -> None:
        if self.steps >= self._warmup_steps:
            self._adopt(bucket)

    def _gathered_coded(self, bucket: GatherBucket) -> None:
        raw = [sizes.raw for sizes in bucket.sizes]
        self.ledger.add("raw_gathers" if all(raw) else "coded_gathers", 1)
        if any(raw):
            self._fallback("incompressible")
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
        transfers = [
            PayloadTransfer(
                self._lane,
                self._ring,
                self._group,
                self._size,
                self._rank,
                lambda piece=piece: self._prepare(bucket, piece),
                lambda region, piece=piece: self._pack(bucket, piece, region),
                self._waves.start_next,
                lambda received, piece=piece: bucket.unpack(piece, received),
            )
            for piece in range(len(bucket.pieces))
        ]
        window = self._ring.num_slots if self._lane.aside or self._lane.device.type == "cpu" else 1
        return GatherHandle(self._lane, transfers, window, lambda: self._gathered_coded(bucket))

    def _prepare(self, bucket: GatherBucket, piece: int) -> int:
        self._waves.need(bucket, piece)
        sizes = bucket.sizes[piece]
        self.ledger.received("bytes_sent", self._size, sizes.padded)
        self.ledger.received("bytes_payload_mean", self._size, sizes.mean)
        return sizes.padded

    def _pack(self, bucket: GatherBucket, piece: int, region: torch.Tensor) -> None:
        bucket.pack(piece, region)
        self._waves.packed(bucket, piece)


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
