"""`--ciera`: attaches the compressed gather to a run, keeps its totals, and stops it when ranks disagree."""

import weakref

import torch
import torch.distributed as dist

from megatron_ciera.errors import ConfigurationError, exit_with
from megatron_ciera.feature import Feature
from megatron_ciera.flags import CieraConfig
from megatron_ciera.param_gather import adapter
from megatron_ciera.param_gather.build import Built, Shared, build_groups
from megatron_ciera.param_gather.group import Round, Tuning
from megatron_ciera.param_gather.lanes import make_lanes
from megatron_ciera.param_gather.ledger import FALLBACKS, Ledger
from megatron_ciera.param_gather.transfer import Ring

PREFIX = "ciera/"
_COUNTS = (
    *("raw_gathers", "raw_gathers/warm_up", "raw_gathers/selection"),
    *("coded_gathers", "unchanged", "exchanges"),
)
_SUMMED = (
    *("bytes_raw", "bytes_sent", "bytes_payload_mean", *_COUNTS),
    *(f"raw_fallbacks/{reason}" for reason in FALLBACKS),
)

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
        self.run = None
        self.built: list[Built] = []
        self.ledger = Ledger()
        self._tuning = tuning or Tuning()
        self._found: list[adapter.FoundGroup] = []
        self._shared: Shared | None = None
        self._totals: dict[str, float] = {}
        self._tail: dict[str, float] | None = None
        _running.add(self)

    def model_built(self, model_chunks: list) -> None:
        self._found = adapter.find_groups(model_chunks)
        self._log_raw()
        if adapter.uses_registered_buffers(model_chunks):
            self.run.log(
                "--ciera with --use-nccl-ub: raw gathers go through the registered buffers as before; compressed "
                "payloads are staged in memory that is not registered, and selection measures them as such"
            )
        for chunk in model_chunks:
            adapter.after_call(chunk, "broadcast_params", self.invalidate)
            chunk.module.register_load_state_dict_post_hook(lambda module, keys: self.invalidate())
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                adapter.after_call(buffer, "reload_from_cpu", self.invalidate)

    def optimizer_built(self, model_chunks: list, optimizer) -> None:
        device = self._found[0].device if self._found else torch.device("cpu")
        lanes = make_lanes(device, aside=self.config.ciera_overlap)
        ring = Ring(self._tuning.num_slots, device)
        self._shared = Shared(
            self.config, self._tuning, device, lanes, ring, self.ledger, Round(), self.run.log
        )
        optimizers = list(adapter.find_optimizers(optimizer))
        compressed = [found for found in self._found if found.raw_reason is None]
        names = adapter.parameter_names(model_chunks)
        try:
            self.built = build_groups(compressed, optimizers, names, self._shared)
        except ConfigurationError as error:
            exit_with(error)
        if device.type == "cpu" and self.config.ciera_selection:
            self.run.log("--ciera: times mean nothing on gloo: selection goes by bytes alone")
        for built in self.built:
            ahead = built.overlapped and self.config.ciera_overlap
            after = built.group.encode_ahead if ahead else lambda: None
            adapter.around_step(optimizers[built.optimizer], built.group.stepped, after)
        for found in self._found:
            self._attach(found)

    def loaded(self, model_chunks: list, optimizer, iteration: int) -> None:
        self.invalidate()

    def invalidate(self, expert_only: bool = False) -> None:
        """Parameters were rewritten outside the optimizer: the next gathers are raw. Call on all ranks alike."""
        for built in self.built:
            if built.expert or not expert_only:
                built.group.forget()

    def before_step(self, iteration: int) -> None:
        interval = self.config.ciera_verify_interval
        for built in self.built:
            built.group.verify = bool(interval) and iteration % interval == 0

    def before_save(self, iteration: int) -> None:
        self._check_damage()

    def finished(self) -> None:
        self._check_damage()
        self._tail = self.metrics()

    def effect(self) -> dict[str, str]:
        total = self._totals
        what = (
            f"{total.get('bytes_sent', 0):.0f} of {total.get('bytes_raw', 0):.0f} bytes sent "
            f"(ratio {_ratio(total):.4f}), {total.get('coded_gathers', 0):.0f} gathers compressed, "
            f"{total.get('raw_gathers', 0):.0f} raw ({total.get('raw_gathers/warm_up', 0):.0f} in the warm-up, "
            f"{total.get('raw_gathers/selection', 0):.0f} by selection), "
            f"{sum(total.get(f'raw_fallbacks/{reason}', 0) for reason in FALLBACKS):.0f} raw fallbacks"
        )
        return {"--ciera": what}

    def without_effect(self) -> dict[str, str]:
        raw, warm_up, selection = (
            self._totals.get(f"raw_gathers{part}", 0) for part in ("", "/warm_up", "/selection")
        )
        if self._totals.get("coded_gathers"):
            return {}
        if raw and raw == warm_up:
            why = (
                f"all {raw:.0f} gathers were in the warm-up (--ciera-warmup-iters "
                f"{self.config.ciera_warmup_iters}). Train more iterations than that, or lower it, to 2 for a trial"
            )
        elif selection:
            why = (
                f"selection kept all {selection:.0f} gathers after the warm-up raw. --ciera-no-selection "
                "compresses them all the same"
            )
        else:
            why = "no gather could be compressed. docs/param_gather.md lists what is gathered raw"
        return {"--ciera": why}

    def _check_damage(self) -> None:
        """Stops every rank of a group in which a gathered block did not have its hash. NOTE: host synchronisation."""
        for built in self.built:
            built.group.check_damage()

    def metrics(self) -> dict[str, float]:
        if self._tail is not None:  # what came after the last logged iteration, read once after the end
            values, self._tail = self._tail, None
            return values
        device = self._found[0].device if self._found else torch.device("cpu")
        summed = torch.tensor(self.ledger.take(_SUMMED), dtype=torch.float64, device=device)
        dist.all_reduce(summed)
        values = dict(zip(_SUMMED, summed.tolist(), strict=True))
        for name, value in values.items():
            self._totals[name] = self._totals.get(name, 0) + value
        values["raw_fallbacks"] = sum(values[f"raw_fallbacks/{reason}"] for reason in FALLBACKS)
        values["ratio"] = _ratio(values)
        values.update(self._slowest(device))
        return {PREFIX + name: _whole(value) for name, value in values.items()}

    def measured_rates(self) -> dict[str, float]:
        """Change rates and bits a value of each class of each group, as the latest decision saw them."""
        rates = {}
        for built in self.built:
            for row in built.group.decision.rows if built.group.decision else ():
                name = f"{PREFIX}{built.group.name}/{row.kind}"
                rates[f"{name}/exponent_change_rate"] = row.stats.exponent_change_rate
                rates[f"{name}/block_change_rate"] = row.stats.block_change_rate
                for codec, num_bytes in row.stats.coded_bytes.items():
                    rates[f"{name}/bits_per_value/{codec}"] = 8 * num_bytes / max(1, row.stats.values)
        return rates

    def _slowest(self, device: torch.device) -> dict[str, float]:
        """Times (ms a rank spent, GPU only) and memory (MB held), of the rank with the most."""
        values = {f"{name}_ms": time for name, time in self._shared.lanes.gather.watch.read().items()}
        held = [built.group.memory for built in self.built]
        values["state_mb"] = sum(memory["state"] for memory in held) / 2**20
        values["staging_mb"] = (
            sum(memory["staging"] for memory in held) + self._shared.ring.num_bytes
        ) / 2**20
        most = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return dict(zip(values, most.tolist(), strict=True))

    def _attach(self, found: adapter.FoundGroup) -> None:
        group = found.bucket_group
        if found.raw_reason is None:
            gathers = [
                (built.group, built.buckets[id(bucket)])
                for bucket in group.buckets
                for built in self.built
                if id(bucket) in built.buckets
            ]
            adapter.replace_gather(group, lambda: [each.gather(bucket) for each, bucket in gathers])
        elif found.size == 1:
            adapter.skip_gather(group)
        else:
            adapter.count_gather(group, lambda: self._count_unsupported(found))

    def _count_unsupported(self, found: adapter.FoundGroup) -> None:
        contribution = found.num_bytes // found.size
        self.ledger.received("bytes_raw", found.size, contribution)
        self.ledger.received("bytes_sent", found.size, contribution)
        if dist.get_rank(found.process_group) == 0:
            self.ledger.add("raw_fallbacks/unsupported", 1)

    def _log_raw(self) -> None:
        for reason in dict.fromkeys(found.raw_reason for found in self._found):
            if reason is not None:
                names = [found.name for found in self._found if found.raw_reason == reason]
                self.run.log(f"--ciera: gathered as without it, {len(names)} × ({names[0]} …): {reason}")


def _ratio(values: dict[str, float]) -> float:
    return values["bytes_sent"] / values["bytes_raw"] if values.get("bytes_raw") else 1.0


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value
