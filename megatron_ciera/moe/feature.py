"""The MoE path as a feature of the run: what is attached when, and in which order things move."""

import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron_ciera.errors import ConfigurationError, exit_with, refuse
from megatron_ciera.feature import Feature
from megatron_ciera.flags import CieraConfig
from megatron_ciera.moe import stored
from megatron_ciera.moe.agreement import agree
from megatron_ciera.moe.counters import Volume, metrics, summaries
from megatron_ciera.moe.fit_process import FitAnswer, FitRequest
from megatron_ciera.moe.groups import make_expert_group
from megatron_ciera.moe.layer import attach_counter, attach_dispatcher, attach_placement
from megatron_ciera.moe.node_groups import NodeGroups, make_node_groups
from megatron_ciera.moe.optimizer_state import OptimizerState, let_remainders_load
from megatron_ciera.moe.placements import Maps, PlacementInForce
from megatron_ciera.moe.plan import tag_dtype
from megatron_ciera.moe.recorder import RouteRecorder
from megatron_ciera.moe.refit import MoveCost, Refit, worthwhile
from megatron_ciera.moe.schedule import FitSchedule
from megatron_ciera.moe.sites import expert_bytes, find_sites
from megatron_ciera.transformer_engine import keeps_remainders
from placement.file import DECODER, MTP, LayerId, Placement


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
        self.name = "MoE: " + (", ".join(parts) or "metrics")
        self.placement = None
        self._target = None
        self._stored_maps = None
        self._fit_info = {}
        self._refit = None
        self._rows = {"moe/rows_stock": 0, "moe/rows_sent": 0}  # of the whole run

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
        if self.placement is not None and optimizer is not None:
            let_remainders_load(optimizer)
        try:
            found = stored.read_stored(get_args())
            if found is None and self.run.load is not None and self._target is not None:
                self.run.log(
                    f"--load {self.run.load}: found no checkpoint: training starts from random weights, under the "
                    f"placement of --placement-file {self.config.placement_file}. If it was to go on from a "
                    "checkpoint, correct --load (--exit-on-missing-checkpoint stops such a run)"
                )
            if found is not None:
                remainders = keeps_remainders(get_args())
                stored.check_loadable(found, self.config.correlated_placement, self._ep_size, remainders)
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
        if self._refit is not None:
            self._refit.started_at = iteration
            self._refit.was_fitted = self._fit_info.get("iteration") is not None
        self._publish()

    def before_step(self, iteration: int) -> None:
        """Arms the recorders when this iteration's routing is to be fitted."""
        if self._refit is not None:
            self._refit.before_step(iteration)

    def after_step(self, iteration: int) -> None:
        """Applies a finished fit when its time has come."""
        if self._refit is not None:
            recorded_at = self._refit.recorded_at
            self._apply(self._refit.after_step(iteration), recorded_at, iteration)

    def before_save(self, iteration: int) -> None:
        """A pending fit is finished first: a resumed run would not know of it."""
        if self._refit is not None:
            recorded_at = self._refit.recorded_at
            self._apply(self._refit.finish(), recorded_at, iteration)

    def finished(self) -> None:
        """Nobody waits for a pending fit any more."""
        if self._refit is not None:
            self._refit.cancel()

    def metrics(self) -> dict[str, float]:
        """See counters.metrics. Collective over all ranks; one host synchronisation."""
        counters = [self._counters.get(layer_id) for layer_id in self._layer_ids]
        columns = summaries(counters, self._ep_rank, self._same_node)
        dist.all_reduce(columns)
        for counter in self._counters.values():
            counter.reset()
        values = metrics(columns, self._volume, [layer_name(layer_id) for layer_id in self._layer_ids])
        for name in self._rows:
            self._rows[name] += values.get(name, 0)
        return values

    def effect(self) -> dict[str, str]:
        done = {}
        if self.config.dedup_dispatch:
            stock, sent = self._rows["moe/rows_stock"], self._rows["moe/rows_sent"]
            removed = 1 - sent / stock if stock else 0.0
            done["--dedup-dispatch"] = (
                f"{sent} of {stock} rows sent ({removed:.1%} removed), forward dispatch"
            )
        if self.config.correlated_placement:
            placed = len(self.placement.changed_layers({}))
            done["--correlated-placement"] = (
                f"experts lie otherwise than contiguously in {placed} of {len(self._layer_ids)} layers"
            )
        return done

    def without_effect(self) -> dict[str, str]:
        found, config = {}, self.config
        if config.dedup_dispatch and self._rows["moe/rows_sent"] == self._rows["moe/rows_stock"]:
            found["--dedup-dispatch"] = (
                f"all {self._rows['moe/rows_stock']} rows were sent: no token had two experts on one rank"
            )
        if config.correlated_placement and not self.placement.changed_layers({}):
            if config.placement_file is not None:
                why = f"{config.placement_file} leaves every expert where Megatron puts it"
            else:
                why = (
                    f"no fit has moved an expert, the first is at iteration {config.placement_fit_iteration} "
                    "(--placement-fit-iteration) and in force some iterations later. Train beyond, or lower it"
                )
            found["--correlated-placement"] = why
        return found

    def _attach(self, model_chunks: list) -> None:
        model = get_model_config(model_chunks[0])
        sites = find_sites(model_chunks)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [site.layer_id for site in sites])
        self._layer_ids = sorted({layer_id for ids in everyone for layer_id in ids})
        self._ranks_per_layer = min(
            (sum(layer_id in ids for ids in everyone) for layer_id in self._layer_ids), default=1
        )
        self._model = model
        self._ep_size = parallel_state.get_expert_model_parallel_world_size()
        self._ep_rank = parallel_state.get_expert_model_parallel_rank()
        self._same_node = self._ranks_on_this_node()
        mappings, recorders = {}, {}
        self._counters = {}
        fits = self.config.correlated_placement and self.config.placement_file is None
        nodes = self._node_groups() if self.config.dedup_dispatch else None
        for site in sites:
            if self.config.dedup_dispatch:
                attach_dispatcher(site.layer, nodes)
            self._counters[site.layer_id] = attach_counter(site.layer)
            if self.config.correlated_placement:
                if fits:
                    recorders[site.layer_id] = RouteRecorder(model.moe_router_topk)
                mappings[site.layer_id] = attach_placement(site.layer, recorders.get(site.layer_id))
        if self.config.correlated_placement:
            self.placement = PlacementInForce(
                sites, mappings, self._layer_ids, model.num_moe_experts, make_expert_group()
            )
        if fits:
            self._refit = self._make_refit(recorders)
        self._volume = self._make_volume()
        hops = "two-hop deduplicating" if nodes is not None else "deduplicating"
        kind = hops if self.config.dedup_dispatch else f"stock {model.moe_token_dispatcher_type}"
        self.run.log(
            f"MoE: {len(self._layer_ids)} layers, {kind} dispatcher, expert-parallel size {self._ep_size}"
        )
        if not self.config.dedup_dispatch and model.moe_token_dispatcher_type == "allgather":
            self.run.log(
                "MoE: allgather sends every token to every rank, so the placement saves no traffic. "
                "Add --moe-token-dispatcher-type alltoall: the deduplicating dispatcher comes with it."
            )

    def _make_refit(self, recorders: dict) -> Refit:
        config = self.config
        first, interval = config.placement_fit_iteration, config.placement_refit_interval
        self.run.log(
            f"MoE: placement fitted at iteration {first}"
            + (f" and every {interval} after it" if interval else "")
            + f", from {config.placement_fit_tokens} tokens"
        )

        def request() -> FitRequest:
            return FitRequest(
                layer_ids=[[layer.block, layer.layer, layer.inner_layer] for layer in self._layer_ids],
                maps=[self.placement.maps[layer].tolist() for layer in self._layer_ids],
                num_experts=self._model.num_moe_experts,
                expert_parallel_size=self._ep_size,
                ranks_per_node=self._ranks_per_node,
                load_tolerance=config.placement_load_tolerance,
                for_shuffling=config.token_shuffle,
            )

        schedule = FitSchedule(first, interval)
        tokens = config.placement_fit_tokens
        return Refit(
            schedule, recorders, self._layer_ids, tokens, self._ranks_per_layer, request, self.run.log
        )

    def _apply(self, answer: FitAnswer | None, recorded_at: int | None, iteration: int) -> None:
        if answer is None:
            return
        if answer.failure is not None:
            self.run.log(f"MoE: fit of iteration {recorded_at}: placement stays as it is: {answer.failure}")
            return
        serves = self._refit.schedule.iterations_until_next(iteration, self.run.train_iters or iteration)
        maps = worthwhile(answer, self.placement.maps, self._move_cost(), serves, self.run.log)
        source = f"routing of iteration {recorded_at}"
        self._fit_info = {
            "tokens": answer.num_tokens,
            "source": source,
            "iteration": recorded_at,
        }
        self._move(maps, f"fit of iteration {recorded_at}, applied after iteration {iteration}")
        self._publish()

    def _move_cost(self) -> MoveCost:
        state = OptimizerState(self._optimizer)
        replicas = self.placement.group.data_size
        size = max((expert_bytes(site, state, replicas) for site in self.placement.sites), default=0)
        # Stages without MoE layers decide with the others.
        size = torch.tensor([size], dtype=torch.int64, device=torch.cuda.current_device())
        dist.all_reduce(size, op=dist.ReduceOp.MAX)
        args = get_args()
        return MoveCost(
            expert_bytes=int(size),
            row_bytes=self._row_bytes(),
            tokens_per_iteration=args.global_batch_size * args.seq_length,
            expert_parallel_size=self._ep_size,
            ranks_per_node=self._ranks_per_node,
        )

    def _save_optimizer_by_expert(self) -> None:
        # Megatron's default format stores the optimizer's buckets as they lie, which is by slot.
        self.run.publish("dist_ckpt_optim_fully_reshardable", True)
        self.run.log("MoE: checkpoints are saved by expert, as with --dist-ckpt-optim-fully-reshardable")

    def _ranks_per_host(self) -> int:
        """Processes on a node: the `cluster:` section's GPUs if there is one, else what torchrun says."""
        if self.config.cluster is not None:
            return self.config.cluster.gpus_per_node
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def _node_groups(self) -> NodeGroups | None:
        group = parallel_state.get_expert_model_parallel_group()
        nodes = make_node_groups(group, self._ranks_per_host())
        if nodes is not None:
            self.run.log(
                f"MoE: expert-parallel groups span {nodes.across.size()} nodes of {nodes.inside.size()} ranks: one "
                "row for each (token, node), relayed inside the node"
            )
        elif self._ep_size > self._ranks_per_node:
            self.run.log(
                "MoE: expert-parallel ranks do not fill whole nodes alike: rows go straight to their ranks"
            )
        return nodes

    def _ranks_on_this_node(self) -> torch.Tensor:
        per_node = self._ranks_per_host()
        ranks = torch.tensor(dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group()))
        # How experts are renamed follows from these numbers: every rank must come to the same.
        everyone = [None] * dist.get_world_size()
        together = int((ranks // per_node == ranks[0] // per_node).sum())
        dist.all_gather_object(everyone, (per_node, together))
        hosts, shares = (sorted(set(numbers)) for numbers in zip(*everyone, strict=True))
        if len(hosts) > 1:
            raise refuse(
                "--nproc-per-node of torchrun",
                f"nodes of {' and '.join(map(str, hosts))} processes",
                "as many on every node",
                "Start as many processes on each, or state gpus_per_node in the `cluster:` section of --config.",
            )
        self._ranks_per_node = shares[0]
        if len(shares) > 1 or self._ep_size % self._ranks_per_node:
            self.run.log(
                f"MoE: {self._ep_size} expert-parallel ranks do not divide over nodes of "
                f"{' or '.join(map(str, shares))}: placement takes all ranks as one node"
            )
            self._ranks_per_node = self._ep_size
        device = torch.cuda.current_device()
        return (ranks // per_node == dist.get_rank() // per_node).to(device)

    def _make_volume(self) -> Volume | None:
        if self._model.moe_token_dispatcher_type != "alltoall":
            return None
        probability = torch.float32
        if self._model.moe_router_dtype == "fp64":
            probability = torch.float64
        elif self._model.moe_router_dtype is None:
            probability = self._model.params_dtype
        local = self._model.num_moe_experts // self._ep_size
        tag = tag_dtype(local).itemsize if self.config.dedup_dispatch else 0
        return Volume(self.config.dedup_dispatch, self._row_bytes(), probability.itemsize + tag)

    def _row_bytes(self) -> int:
        width = self._model.moe_latent_size or self._model.hidden_size
        return width * self._model.params_dtype.itemsize

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
        return self.resolve(placement)

    def records_routing(self, iteration: int) -> bool:
        """Whether the routing of `iteration` is recorded for a fit."""
        return self._refit is not None and self._refit.recorded_at == iteration

    def resolve(self, placement: Placement) -> Maps:
        """A placement's maps by layer of this model, in the placement's order. ValueError if it does not fit."""
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
        self._stored_maps = self.resolve(placement)
        self._fit_info = self._fit_info or placement.fit
        self.placement.move_to(self._stored_maps, optimizer)

    def _move(self, maps: Maps, reason: str) -> None:
        changed = self.placement.changed_layers(maps)
        if changed:
            _gather_parameters(self._chunks)
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


def layer_name(layer_id: LayerId) -> str:
    """A layer in the names of metrics: layer_3, mtp_0, mtp_0_1 for the second layer of an MTP head."""
    inner = f"_{layer_id.inner_layer}" if layer_id.inner_layer else ""
    return f"{'layer' if layer_id.block == DECODER else layer_id.block}_{layer_id.layer}{inner}"


def _gather_parameters(model_chunks: list) -> None:
    """With overlapped gathers the last step's parameters are still shards: completes them, on every rank."""
    for chunk in model_chunks:
        if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
