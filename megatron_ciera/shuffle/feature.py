"""Token shuffling as a feature of the run: what is attached, where tables come from, when it is switched off."""

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_model_config

from megatron_ciera.errors import ConfigurationError, exit_with, refuse
from megatron_ciera.feature import Feature
from megatron_ciera.flags import CieraConfig
from megatron_ciera.moe.agreement import agree
from megatron_ciera.moe.feature import MoEFeature
from megatron_ciera.shuffle.chunk import ChunkShuffle
from megatron_ciera.shuffle.counters import NUM_COLUMNS, Prices, metrics, repays, verdict
from megatron_ciera.shuffle.groups import make_shuffle_groups
from megatron_ciera.shuffle.jobs import plan_jobs
from megatron_ciera.shuffle.layer import LayerHooks
from megatron_ciera.shuffle.run_fit import RunFit
from megatron_ciera.shuffle.tables import ScoreTables
from placement.file import DECODER, LayerId, Placement
from placement.prediction import LayerTables
from placement.table_file import load_tables

# Iterations after which a layer that does not repay is switched off.
TRIAL_ITERATIONS = 10


class ShuffleFeature(Feature):
    """Shuffles tokens in the decoder's layers. Comes behind MoEFeature, whose placement it reads."""

    name = "token shuffling"

    def __init__(self, config: CieraConfig):
        self.config = config
        self._tables: dict[int, LayerTables] = {}
        self._trial_ends = None
        self._since_install = None
        self._last_iteration = 0
        self._rows_moved = 0  # in the whole run

    def model_built(self, model_chunks: list) -> None:
        """Attaches to every decoder layer; tables of a placement file are read and compared over ranks."""
        try:
            self._attach(model_chunks)
            if self.config.placement_file is not None:
                self._tables = self._read_tables(self.config.placement_file)
        except (ConfigurationError, ValueError) as error:
            exit_with(error)

    def loaded(self, model_chunks: list, optimizer, iteration: int) -> None:
        """Installs a file's tables; without a file they are fitted in the run."""
        self._last_iteration = iteration
        if self._run_fit is not None:
            self._run_fit.started_at = iteration
        self._install(self._tables, iteration)

    def before_step(self, iteration: int) -> None:
        """No token is shuffled in iterations whose routing is recorded or traced in the order of tokens."""
        self._last_iteration = iteration
        if self._run_fit is not None:
            self._run_fit.before_step(iteration)
        paused = self._moe.records_routing(iteration) or _is_traced()
        if paused and self._trial_ends is not None:
            self._trial_ends += 1
        for chunk in self._chunks:
            chunk.paused = paused
            chunk.forget_passages()

    def after_step(self, iteration: int) -> None:
        """Installs tables when their time has come, and judges them when their trial is over."""
        if self._run_fit is not None:
            tables = self._run_fit.after_step(iteration, self._expert_to_rank())
            if tables is not None:
                self._install(tables, iteration)
        if self._trial_ends is not None and iteration >= self._trial_ends:
            self._judge()

    def invalidate(self, expert_only: bool = False) -> None:
        """Experts have moved: tables name ranks, so they end with the placement they were fitted for."""
        if expert_only and self._run_fit is not None:
            self._run_fit.restart(self._last_iteration)
            self._install({}, self._last_iteration)

    def finished(self) -> None:
        """Nobody waits for a pending fit any more."""
        if self._run_fit is not None:
            self._run_fit.cancel()

    def metrics(self) -> dict[str, float]:
        """See counters.metrics. Collective over all ranks; one host synchronisation."""
        counts = self._collect()
        for chunk in self._chunks:
            for counter in chunk.counters:
                counter.reset()
        values = metrics(self._names(), counts, self._prices)
        self._rows_moved += values.get("moe/shuffle_rows_moved", 0)
        if self._since_install is not None:
            self._since_install += counts
        return values | (self._times() if values else {})

    def effect(self) -> dict[str, str]:
        return {"--token-shuffle": f"{self._rows_moved} rows moved to another rank"}

    def without_effect(self) -> dict[str, str]:
        if self._rows_moved:
            return {}
        if self.config.placement_file is not None:
            why = "the placement's tables promise no more than position does, or every token was at its place"
        else:
            why = (
                f"no token was moved. Tables are fitted from iteration {self.config.placement_fit_iteration} on "
                "(--placement-fit-iteration). Train beyond, or lower it"
            )
        return {"--token-shuffle": why}

    def _attach(self, model_chunks: list) -> None:
        model = get_model_config(model_chunks[0])
        self._moe = next(peer for peer in self.peers if isinstance(peer, MoEFeature))
        groups = make_shuffle_groups()
        self._num_ranks, self._num_experts = groups.shuffle.size(), model.num_moe_experts
        device = torch.cuda.current_device()
        self._chunks, self._numbers = [], []
        for block in _decoders(model_chunks):
            is_moe = [isinstance(layer.mlp, MoELayer) for layer in block.layers]
            chunk = ChunkShuffle(is_moe, groups.shuffle, model.moe_router_topk, device)
            for index, layer in enumerate(block.layers):
                LayerHooks(layer, chunk, index, self.config.token_shuffle_residual)
            self._chunks.append(chunk)
            self._numbers.append([layer.layer_number - 1 for layer in block.layers])
        self._prices = self._make_prices(model)
        self._find_candidates()
        if self.config.placement_file is None:
            sizes = (self._num_experts, self._num_ranks)
            self._run_fit = RunFit(self.config, self._chunks, self._numbers, groups, sizes, self.run.log)
        else:
            self._run_fit = None

    def _find_candidates(self) -> None:
        """Global numbers of all layers of the model, and of those that could shuffle."""
        mine = []
        for chunk, numbers in zip(self._chunks, self._numbers, strict=True):
            jobs = plan_jobs(chunk.is_moe, [True] * len(numbers)).values()
            able = {numbers[job.target] for job in jobs if job.evidence is not None}
            mine += [(number, number in able) for number in numbers]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        found = sorted({entry for entries in everyone for entry in entries})
        self._all_layers = [number for number, _ in found]
        self._candidates = [number for number, able in found if able]
        if not self._candidates:
            raise refuse(
                "--token-shuffle",
                f"{len(found)} layers, of which none has two MoE layers before it and one layer behind it in its "
                "pipeline chunk",
                "at least four layers in a pipeline chunk",
                "Use fewer pipeline stages or virtual chunks, or leave out --token-shuffle.",
            )
        self.run.log(
            f"token shuffling: layers {', '.join(map(str, self._candidates))} can shuffle among "
            f"{self._num_ranks} ranks, residual: {self.config.token_shuffle_residual}"
        )

    def _make_prices(self, model) -> Prices:
        residual = torch.float32 if model.fp32_residual_connection else model.params_dtype
        width = model.moe_latent_size or model.hidden_size
        return Prices(
            deduplicated=self.config.dedup_dispatch or model.moe_token_dispatcher_type == "flex",
            row_bytes=width * model.params_dtype.itemsize,
            residual_bytes=model.hidden_size * residual.itemsize,
            gather_bytes=2 * model.moe_router_topk * (self._num_ranks - 1),
            exchanged=self.config.token_shuffle_residual == "exchange",
        )

    def _read_tables(self, path: str) -> dict[int, LayerTables]:
        placement = Placement.load(path)
        content, failure = None, None
        try:
            tables = load_tables(placement.tables_path, placement)
            content = hashlib.sha256(placement.tables_path.read_bytes()).hexdigest()
        except (OSError, ValueError) as error:
            failure = error
        where = f"--token-shuffle, {placement.tables_path}"
        agree(where, content, failure, "needs the same file on every node: copy it again")
        layers = self._moe.resolve(placement)
        found = zip(layers, tables, strict=True)
        return {layer.layer: of for layer, of in found if of is not None and layer.block == DECODER}

    def _install(self, tables: Mapping[int, LayerTables], iteration: int) -> None:
        """Uses the tables (global layer -> ) that beat chance on held-out tokens. Collective."""
        self._use({layer: of for layer, of in tables.items() if of.held_out_locality > of.held_out_chance})
        self._report_install(tables, iteration)

    def _use(self, tables: Mapping[int, LayerTables]) -> None:
        self._tables = dict(tables)
        ranks = self._expert_to_rank()
        device = torch.cuda.current_device()
        for chunk, numbers in zip(self._chunks, self._numbers, strict=True):
            scores = {
                index: ScoreTables.of(tables[number], device)
                for index, number in enumerate(numbers)
                if number in tables
            }
            placed = {
                index: torch.from_numpy(ranks[number]).to(device) for index, number in enumerate(numbers)
            }
            chunk.install(scores, placed)

    def _report_install(self, tables: Mapping[int, LayerTables], iteration: int) -> None:
        everyone = [None] * dist.get_world_size()
        mine = {layer: (of.held_out_locality, of.held_out_chance) for layer, of in tables.items()}
        dist.all_gather_object(everyone, mine)
        found = {layer: of for part in everyone for layer, of in part.items() if layer in self._candidates}
        used = [layer for layer, (locality, chance) in found.items() if locality > chance]
        self._active = sorted(used)
        self._trial_ends = iteration + TRIAL_ITERATIONS if used else None
        self._since_install = -self._collect() if used else None
        for layer in sorted(set(found) - set(used)):
            self.run.log(
                f"token shuffling: layer {layer} stays: on held-out tokens prediction finds "
                f"{found[layer][0]:.1%} of the experts on the owner, position {found[layer][1]:.1%}"
            )
        if used:
            predicted = np.mean([found[layer][0] for layer in used])
            self.run.log(
                f"token shuffling: on in {len(used)} of {len(self._candidates)} layers after iteration "
                f"{iteration}; locality on held-out fit tokens {predicted:.1%}, by position "
                f"{np.mean([found[layer][1] for layer in used]):.1%}"
            )

    def _expert_to_rank(self) -> dict[int, np.ndarray]:
        """[E] int64 for every layer of this rank, by the placement in force."""
        local = self._num_experts // self._num_ranks
        ranks = {}
        for number in (number for numbers in self._numbers for number in numbers):
            map_ = np.arange(self._num_experts)
            if self._moe.placement is not None:
                map_ = self._moe.placement.maps.get(LayerId(DECODER, number), map_)
            ranks[number] = np.argsort(map_) // local
        return ranks

    def _collect(self) -> torch.Tensor:
        """[layers of the model, NUM_COLUMNS] int64 counts since the last reading, over all ranks. Collective."""
        device = torch.cuda.current_device()
        counts = torch.zeros((len(self._all_layers), NUM_COLUMNS), dtype=torch.int64, device=device)
        for chunk, numbers in zip(self._chunks, self._numbers, strict=True):
            chunk.planner.settle()
            for number, counter in zip(numbers, chunk.counters, strict=True):
                counts[self._all_layers.index(number)] += counter.counts
        dist.all_reduce(counts)
        return counts

    def _judge(self) -> None:
        """Switches layers off whose trial did not repay; decided from sums over all ranks, so alike on each."""
        counts = (self._since_install + self._collect()).cpu()
        self._trial_ends = None
        stay = {}
        for layer in self._active:
            of_layer = counts[self._all_layers.index(layer)]
            stay[layer] = repays(of_layer, self._prices)
            if not stay[layer]:
                self.run.log(
                    f"token shuffling: layer {layer} switched off: {verdict(of_layer, self._prices)}"
                )
        if not any(stay.values()):
            self.run.log("token shuffling: switched off in all layers, as it does not repay here")
        if not all(stay.values()):
            self._active = [layer for layer in self._active if stay[layer]]
            self._use({layer: of for layer, of in self._tables.items() if stay.get(layer)})

    def _names(self) -> list[str]:
        return [f"layer_{number}" for number in self._all_layers]

    def _times(self) -> dict[str, float]:
        """Planner's time of a plan and the host's wait for it in milliseconds, means of the slowest rank."""
        plans = [time for chunk in self._chunks for time in chunk.planner.milliseconds()]
        seconds, joins = map(sum, zip(*(chunk.take_host_waits() for chunk in self._chunks), strict=True))
        means = [sum(plans) / max(1, len(plans)), 1e3 * seconds / max(1, joins)]
        times = torch.tensor(means, dtype=torch.float64)
        times = times.to(torch.cuda.current_device())
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        planner, wait = times.tolist()
        return {"moe/planner_ms": planner, "moe/planner_wait_ms": wait}


def _decoders(model_chunks: list) -> list[TransformerBlock]:
    """The decoder of each chunk; MTP layers stay as they are, in canonical order."""
    found = [
        module for chunk in model_chunks for module in chunk.modules() if isinstance(module, TransformerBlock)
    ]
    if len(found) != len(model_chunks):
        raise ConfigurationError(
            f"--token-shuffle: found {len(found)} TransformerBlocks in {len(model_chunks)} pipeline chunks, needs "
            "one in each. Leave out --token-shuffle with this model."
        )
    return found


def _is_traced() -> bool:
    from megatron.core.transformer.moe.router_trace import get_moe_router_tracer

    tracer = get_moe_router_tracer()
    return tracer is not None and not tracer._stopped
