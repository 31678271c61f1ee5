"""Builds the shard groups of a run from what Megatron made: once, after the optimizer exists."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ciera.flags import CieraConfig
from megatron_ciera.param_gather import adapter
from megatron_ciera.param_gather.bucket import GatherBucket
from megatron_ciera.param_gather.codec_choice import agree_on_codecs
from megatron_ciera.param_gather.costs import plan_pieces
from megatron_ciera.param_gather.decider import Decider, Policy
from megatron_ciera.param_gather.exchange import Exchange
from megatron_ciera.param_gather.group import Round, ShardGroup, Tuning
from megatron_ciera.param_gather.lanes import Lanes
from megatron_ciera.param_gather.ledger import Ledger
from megatron_ciera.param_gather.process_groups import make_own_groups
from megatron_ciera.param_gather.transfer import Ring


@dataclass(frozen=True)
class Member:
    """A bucket, where it was found, and the number of the optimizer that steps it."""

    found: adapter.FoundGroup
    bucket: object
    optimizer: int

    @property
    def key(self) -> tuple:
        """Buckets with equal keys form a shard group. Keys sort alike on all ranks that share them."""
        ranks = tuple(dist.get_process_group_ranks(self.found.process_group))
        return self.optimizer, self.found.expert, ranks, str(self.bucket.param_data.dtype)


@dataclass(frozen=True)
class Shared:
    """What all groups of a rank share."""

    config: CieraConfig
    tuning: Tuning
    device: torch.device
    lanes: Lanes
    ring: Ring
    ledger: Ledger
    round: Round
    log: Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """A shard group, its buckets by `id` of Megatron's bucket, and what it was made from."""

    group: ShardGroup
    buckets: dict[int, GatherBucket]
    optimizer: int
    expert: bool
    overlapped: bool


def build_groups(
    found: list[adapter.FoundGroup], optimizers: list, names: dict, shared: Shared
) -> list[Built]:
    """All shard groups of this rank. Collective over the world: ranks without any take part too.

    Raises:
        ConfigurationError: on every rank alike, if no codec works on all of them.
    """
    members = [
        Member(each, bucket, _optimizer_of(bucket, optimizers))
        for each in found
        for bucket in each.bucket_group.buckets
    ]
    own_groups = make_own_groups(member.found.process_group for member in members)
    codecs = _codecs_by_dtype(members, shared)
    parts: dict[tuple, list[Member]] = {}
    for member in members:
        parts.setdefault(member.key, []).append(member)
    total = sum(member.bucket.param_data.nbytes // _size(member) for member in members)
    return [_build(parts[key], own_groups[key[2]], codecs, names, total, shared) for key in sorted(parts)]


def _build(members: list[Member], own_group, codecs, names, total_bytes: int, shared: Shared) -> Built:
    config, first = shared.config, members[0]
    group, size = first.found.process_group, _size(first)
    dtype = first.bucket.param_data.dtype
    costs, piece_values = plan_pieces(
        group,
        own_group,
        codecs[dtype],
        max(member.bucket.param_data.numel() for member in members) // size,
        dtype,
        config.ciera_overlap,
        shared.tuning,
    )
    buckets: list[GatherBucket] = []
    slots = 0
    for index, member in enumerate(members):
        values = member.bucket.param_data
        buckets.append(
            GatherBucket(
                member.found.name,
                index,
                values,
                dist.get_rank(group),
                size,
                adapter.parameter_runs(member.bucket, names),
                codecs[dtype],
                piece_values,
                slots,
            )
        )
        slots += buckets[-1].num_slots
    name = (
        f"{'expert' if first.found.expert else 'dense'} buckets of optimizer {first.optimizer}, {size} ranks"
    )
    policy = Policy(
        codecs=tuple(codecs[dtype]),
        select=config.ciera_selection,
        budget=_budget(config, sum(b.shard_bytes for b in buckets), total_bytes),
        warmup_steps=max(1, config.ciera_warmup_iters),
        block_size=config.ciera_block_size,
    )
    decider = Decider(
        name, buckets, codecs[dtype], policy, costs if config.ciera_selection else None, shared.log
    )
    exchange = Exchange(own_group, slots, decider.num_counts, shared.device, shared.lanes, shared.ledger)
    shard_group = ShardGroup(
        name,
        group,
        buckets,
        exchange,
        shared.ring,
        shared.lanes,
        shared.ledger,
        config.ciera_warmup_iters,
        shared.tuning,
        shared.round,
        decider,
    )
    return Built(
        shard_group,
        {id(member.bucket): bucket for member, bucket in zip(members, buckets, strict=True)},
        first.optimizer,
        first.found.expert,
        first.found.bucket_group.ddp_config.overlap_param_gather,
    )


def _codecs_by_dtype(members: list[Member], shared: Shared) -> dict:
    """Usable codecs by dtype, agreed by the whole world for every dtype that any rank has."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted({str(member.bucket.param_data.dtype) for member in members}))
    made = {}
    for text in sorted({text for named in everyone for text in named}):
        dtype = getattr(torch, text.removeprefix("torch."))
        config = shared.config
        made[dtype], notes = agree_on_codecs(
            config.ciera_codec,
            config.ciera_coder,
            config.ciera_selection,
            dtype,
            config.ciera_block_size,
            shared.device,
        )
        for note in notes:
            shared.log(f"--ciera: {note}")
    return made


def _optimizer_of(bucket, optimizers: list) -> int:
    for index, optimizer in enumerate(optimizers):
        if any(bucket is each for buffer in optimizer.buffers for each in buffer.buckets):
            return index
    raise RuntimeError("--ciera: a parameter bucket belongs to no distributed optimizer; please report this")


def _budget(config: CieraConfig, shard_bytes: int, total_bytes: int) -> int | None:
    """This group's share of the cap on cache memory, by its share of the parameters."""
    if config.ciera_cache_budget_mb is None:
        return None
    return int(config.ciera_cache_budget_mb * 2**20 * shard_bytes / total_bytes)


def _size(member: Member) -> int:
    return member.found.size
