"""`--ciera`: attaches the compressed gather to a run, keeps its totals, and stops it when ranks disagree."""

import weakref

import torch
import torch.distributed as dist

from megatron_ciera.feature import Feature
from megatron_ciera.flags import CieraConfig
from megatron_ciera.param_gather import adapter
from megatron_ciera.param_gather.bucket import GatherBucket
from megatron_ciera.param_gather.codec import CODECS, make_codec
from megatron_ciera.param_gather.exchange import Exchange
from megatron_ciera.param_gather.group import Round, ShardGroup, Tuning
from megatron_ciera.param_gather.lanes import Lane
from megatron_ciera.param_gather.ledger import FALLBACKS, Ledger
from megatron_ciera.param_gather.process_groups import make_own_groups
from megatron_ciera.param_gather.transfer import Ring

PREFIX = "ciera/"
_BYTES = ("bytes_raw", "bytes_sent", "bytes_payload_mean")
_COUNTS = ("raw_gathers", "coded_gathers", "unchanged", "exchanges")


_running: "weakref.WeakSet[ParamGatherFeature]" = weakref.WeakSet()


def weights_changed(expert_only: bool = False) -> None:
    """To be called, on all ranks alike, by code that rewrites parameters between steps: the next gathers are raw."""
    for feature in _running:
        feature.invalidate(expert_only)


class ParamGatherFeature(Feature):
    """The compressed, bit-exact parameter gather."""

    name = "compressed parameter gather (--ciera)"

    def __init__(self, config: CieraConfig, tuning: Tuning | None = None):
        self.config = config
        self._tuning = tuning or Tuning()
        self.run = None
        self.groups: list[ShardGroup] = []
        self.ledger = Ledger()
        self._found: list[adapter.FoundGroup] = []
        self._group_of: dict[int, tuple[ShardGroup, list[GatherBucket]]] = {}
        self._expert_groups: list[ShardGroup] = []
        self._totals: dict[str, float] = {}
        self._round = Round()
        _running.add(self)

    def model_built(self, model_chunks: list) -> None:
        self._found = adapter.find_groups(model_chunks)
        self._log_raw()
        for chunk in model_chunks:
            adapter.after_call(chunk, "broadcast_params", self.invalidate)
            chunk.module.register_load_state_dict_post_hook(lambda module, keys: self.invalidate())
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                adapter.after_call(buffer, "reload_from_cpu", self.invalidate)

    def optimizer_built(self, model_chunks: list, optimizer) -> None:
        compressed = [found for found in self._found if found.raw_reason is None]
        own = make_own_groups(found.process_group for found in compressed)
        if compressed:
            self._build(model_chunks, list(adapter.find_optimizers(optimizer)), compressed, own)
        for found in self._found:
            self._attach(found)

    def loaded(self, model_chunks: list, optimizer, iteration: int) -> None:
        self.invalidate()

    def invalidate(self, expert_only: bool = False) -> None:
        """Parameters were rewritten outside the optimizer: the next gathers are raw. Call on all ranks alike."""
        for group in self._expert_groups if expert_only else self.groups:
            group.forget()

    def before_save(self, iteration: int) -> None:
        self.check_damage()

    def finished(self) -> None:
        self.check_damage()

    def check_damage(self) -> None:
        """Stops every rank of a group in which a gathered block did not have its hash. NOTE: host synchronisation."""
        for group in self.groups:
            group.check_damage()

    def metrics(self) -> dict[str, float]:
        names = (*_BYTES, *_COUNTS, *(f"raw_fallbacks/{reason}" for reason in FALLBACKS))
        summed = torch.tensor(self.ledger.take(names), dtype=torch.float64, device=self._device)
        dist.all_reduce(summed)
        values = dict(zip(names, summed.tolist(), strict=True))
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0) + value
        values["raw_fallbacks"] = sum(values[f"raw_fallbacks/{reason}"] for reason in FALLBACKS)
        values["ratio"] = _ratio(values)
        return {PREFIX + name: _whole(value) for name, value in values.items()}

    def _build(self, model_chunks, optimizers, compressed, own) -> None:
        names = adapter.parameter_names(model_chunks)
        device = compressed[0].bucket_group.buckets[0].param_data.device
        lane = Lane(device, aside=self.config.ciera_overlap)
        ring = Ring(self._tuning.num_slots, device, lane)
        optimizer_of = {
            id(bucket): index
            for index, optimizer in enumerate(optimizers)
            for buffer in optimizer.buffers
            for bucket in buffer.buckets
        }
        parts: dict[tuple, list[adapter.FoundGroup]] = {}
        for found in compressed:
            ranks = tuple(dist.get_process_group_ranks(found.process_group))
            index = optimizer_of.get(id(found.bucket_group.buckets[0]), 0)
            parts.setdefault((index, ranks), []).append(found)
        for (index, ranks), members in parts.items():
            group = self._make_group(members, names, own[ranks], device, lane, ring)
            self.groups.append(group)
            if any(found.expert for found in members):
                self._expert_groups.append(group)
            adapter.around_step(optimizers[index], group.stepped, self._after_step(members[0], group))

    def _after_step(self, found, group):
        overlapped = found.bucket_group.ddp_config.overlap_param_gather and self.config.ciera_overlap
        return group.encode_ahead if overlapped else lambda: None

    def _make_group(self, members, names, own_group, device, lane, ring) -> ShardGroup:
        size = adapter.size_of(members[0].process_group)
        rank = dist.get_rank(members[0].process_group)
        buckets: list[GatherBucket] = []
        slots = 0
        for found in members:
            mine = []
            for bucket in found.bucket_group.buckets:
                values = bucket.param_data
                piece_values = max(1, self._tuning.piece_bytes // (size * values.element_size()))
                made = GatherBucket(
                    found.name,
                    values,
                    rank,
                    size,
                    adapter.parameter_runs(bucket, names),
                    self._codecs(values.dtype, device),
                    piece_values,
                    slots,
                )
                made.choose(self._first_choice)
                slots += made.num_slots
                mine.append(made)
            buckets += mine
            self._group_of[id(found.bucket_group)] = mine
        exchange = Exchange(own_group, slots, device, lane, self.ledger)
        group = ShardGroup(
            members[0].name,
            members[0].process_group,
            buckets,
            exchange,
            ring,
            lane,
            self.ledger,
            self.config.ciera_warmup_iters,
            self._tuning,
            self._round,
        )
        for found in members:
            self._group_of[id(found.bucket_group)] = (group, self._group_of[id(found.bucket_group)])
        return group

    def _codecs(self, dtype, device) -> dict:
        return {
            name: make_codec(name, self.config.ciera_coder, dtype, self.config.ciera_block_size, device)
            for name in CODECS
        }

    def _first_choice(self, segment) -> str:
        return "delta" if self.config.ciera_codec == "auto" else self.config.ciera_codec

    def _attach(self, found) -> None:
        if found.raw_reason is None:
            group, buckets = self._group_of[id(found.bucket_group)]
            adapter.replace_gather(found.bucket_group, lambda: [group.gather(bucket) for bucket in buckets])
        elif getattr(found.bucket_group, "intra_distributed_optimizer_instance_size", 2) == 1:
            adapter.skip_gather(found.bucket_group)

    def _log_raw(self) -> None:
        for reason in dict.fromkeys(found.raw_reason for found in self._found):
            if reason is not None:
                names = [found.name for found in self._found if found.raw_reason == reason]
                self.run.log(f"--ciera: raw for good: {len(names)} bucket groups ({names[0]}, …): {reason}")

    @property
    def _device(self) -> torch.device:
        return self._found[0].bucket_group.buckets[0].grad_data.device if self._found else torch.device("cpu")


def _ratio(values: dict[str, float]) -> float:
    return values["bytes_sent"] / values["bytes_raw"] if values["bytes_raw"] else 1.0


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value
