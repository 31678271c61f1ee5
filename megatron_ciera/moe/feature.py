"""The MoE path as a feature of the run: what is attached when, and in which order things move."""

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron_ciera.errors import ConfigurationError, exit_with
from megatron_ciera.feature import Feature
from megatron_ciera.flags import CieraConfig
from megatron_ciera.moe import stored
from megatron_ciera.moe.agreement import agree
from megatron_ciera.moe.counters import NUM_COLUMNS, Volume, metrics
from megatron_ciera.moe.groups import make_expert_group
from megatron_ciera.moe.layer import attach_counter, attach_dispatcher, attach_placement
from megatron_ciera.moe.optimizer_state import OptimizerState
from megatron_ciera.moe.placements import Maps, PlacementInForce
from megatron_ciera.moe.plan import tag_dtype
from megatron_ciera.moe.sites import find_sites
from placement.file import DECODER, MTP, Placement


class MoEFeature(Feature):
    """Placement, migration, deduplicating dispatch and their metrics, as far as the flags ask for them."""

    def __init__(self, config: CieraConfig):
        self.config = config
        parts = [
            name
            for name, wanted in (
                ("correlated placement", config.correlated_placement),
                ("deduplicating dispatcher", config.dedup_dispatch),
            )
            if wanted
        ]
        self.name = "MoE: " + ", ".join(parts)
        self.placement = None
        self._target = None
        self._fit_info = {}

    def model_built(self, model_chunks: list) -> None:
        """Attaches to every MoE layer; a placement file is read, compared over ranks and checked."""
        try:
            self._attach(model_chunks)
            if self.config.correlated_placement:
                self._save_optimizer_by_expert()
            if self.config.placement_file is not None:
                self._target = self._read_file(self.config.placement_file)
        except (ConfigurationError, ValueError) as error:
            exit_with(error)

    def optimizer_built(self, model_chunks: list, optimizer) -> None:
        """Installs the placement that the checkpoint was saved under, so that state stored by slot fits."""
        self._stored_maps = None
        try:
            found = stored.read_stored(get_args())
            if found is not None:
                stored.check_loadable(found, self.config.correlated_placement)
                if self.placement is not None and found.placement is not None:
                    self._install_stored(found.placement, OptimizerState(optimizer))
        except ValueError as error:
            exit_with(error)

    def loaded(self, model_chunks: list, optimizer, iteration: int) -> None:
        """Moves experts, with their optimizer state, to where this run wants them."""
        self._optimizer, self._chunks = optimizer, model_chunks
        if self.placement is None:
            return
        target = self._target if self._target is not None else self._stored_maps
        if target is not None:
            self._move(target, "placement file" if self._target is not None else "checkpoint's placement")
        self._publish()

    def metrics(self) -> dict[str, float]:
        """See counters.metrics. Collective over all ranks; one host synchronisation."""
        columns = torch.stack([self._summary(layer_id) for layer_id in self._layer_ids])
        dist.all_reduce(columns)
        for counter in self._counters.values():
            counter.reset()
        return metrics(columns, self._volume)

    def _attach(self, model_chunks: list) -> None:
        model = get_model_config(model_chunks[0])
        sites = find_sites(model_chunks)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [site.layer_id for site in sites])
        self._layer_ids = sorted({layer_id for ids in everyone for layer_id in ids})
        self._model = model
        self._ep_size = parallel_state.get_expert_model_parallel_world_size()
        self._ep_rank = parallel_state.get_expert_model_parallel_rank()
        self._same_node = self._ranks_on_this_node()
        mappings = {}
        self._counters = {}
        for site in sites:
            if self.config.dedup_dispatch:
                attach_dispatcher(site.layer)
            self._counters[site.layer_id] = attach_counter(site.layer)
            if self.config.correlated_placement:
                mappings[site.layer_id] = attach_placement(site.layer)
        if self.config.correlated_placement:
            self.placement = PlacementInForce(
                sites, mappings, self._layer_ids, model.num_moe_experts, make_expert_group()
            )
        self._volume = self._make_volume()
        kind = "deduplicating" if self.config.dedup_dispatch else f"stock {model.moe_token_dispatcher_type}"
        self.run.log(
            f"MoE: {len(self._layer_ids)} layers, {kind} dispatcher, expert-parallel size {self._ep_size}"
        )

    def _save_optimizer_by_expert(self) -> None:
        # Megatron's default format stores the optimizer's buckets as they lie, which is by slot.
        self.run.publish("dist_ckpt_optim_fully_reshardable", True)
        self.run.log("MoE: checkpoints are saved by expert, as with --dist-ckpt-optim-fully-reshardable")

    def _ranks_on_this_node(self) -> torch.Tensor:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self.config.cluster is not None:
            per_node = self.config.cluster.gpus_per_node
        ranks = torch.tensor(dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group()))
        self._ranks_per_node = int((ranks // per_node == ranks[0] // per_node).sum())
        device = torch.cuda.current_device()
        return (ranks // per_node == dist.get_rank() // per_node).to(device)

    def _make_volume(self) -> Volume | None:
        if self._model.moe_token_dispatcher_type != "alltoall":
            return None
        width = self._model.moe_latent_size or self._model.hidden_size
        row_bytes = width * self._model.params_dtype.itemsize
        probability = torch.float32
        if self._model.moe_router_dtype == "fp64":
            probability = torch.float64
        elif self._model.moe_router_dtype is None:
            probability = self._model.params_dtype
        local = self._model.num_moe_experts // self._ep_size
        tag = tag_dtype(local).itemsize if self.config.dedup_dispatch else 0
        return Volume(self.config.dedup_dispatch, row_bytes, probability.itemsize + tag)

    def _read_file(self, path: str) -> Maps:
        content, placement, failure = None, None, None
        try:
            content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            placement = Placement.load(path)
        except (OSError, ValueError) as error:
            failure = error
        agree(
            f"--placement-file {path}", content, failure, "needs the same file on every node: copy it again"
        )
        self._fit_info = placement.fit
        return self._resolve(placement)

    def _resolve(self, placement: Placement) -> Maps:
        return placement.check_model(
            self._model.num_moe_experts,
            self._model.moe_router_topk,
            self._ep_size,
            [layer_id.layer for layer_id in self._layer_ids if layer_id.block == DECODER],
            [layer_id for layer_id in self._layer_ids if layer_id.block == MTP],
        )

    def _install_stored(self, placement: Placement, optimizer: OptimizerState) -> None:
        if placement.expert_parallel_size != self._ep_size:
            self.run.log(
                f"MoE: the checkpoint's placement is for expert-parallel size {placement.expert_parallel_size}, "
                f"this run has {self._ep_size}: experts start contiguous"
            )
            return
        self._stored_maps = self._resolve(placement)
        self._fit_info = self._fit_info or placement.fit
        self.placement.move_to(self._stored_maps, optimizer)

    def _move(self, maps: Maps, reason: str) -> None:
        changed = self.placement.changed_layers(maps)
        received = self.placement.move_to(maps, OptimizerState(self._optimizer))
        total = torch.tensor([received], dtype=torch.int64, device=torch.cuda.current_device())
        dist.all_reduce(total)
        if changed:
            for feature in self.peers:
                feature.invalidate(expert_only=True)
        self.run.log(
            f"MoE: {reason}: experts moved in {len(changed)} of {len(self._layer_ids)} layers, "
            f"{int(total) / 1e6:.1f} MB received by all ranks"
        )

    def _publish(self) -> None:
        document = self.placement.document(
            self._model.moe_router_topk, self._ep_size, self._ranks_per_node, self._fit_info
        )
        self.run.publish(stored.KEY, document)

    def _summary(self, layer_id) -> torch.Tensor:
        counter = self._counters.get(layer_id)
        if counter is not None:
            return counter.summary(self._ep_rank, self._same_node)
        return torch.zeros_like(self._same_node, dtype=torch.int64).new_zeros(NUM_COLUMNS + self._ep_size)
