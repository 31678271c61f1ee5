"""One optimizer step from equal states: contiguous, placed and deduplicated bf16 training against fp32.

torchrun … bounds_worker.py OUT EP ITERATION…: four processes. A small GPT is trained with stock Megatron, contiguous.
Before each of the iterations its state (weights, masters, moments) is copied into the other models, experts are
moved to a random placement there, and every model takes the next step with the same tokens, for several batches.
Rank 0 writes OUT/results.json:
{iteration: {"losses", "norms": {model: [batches]}, "errors": {model: {tensor: L2 distance to fp32}}}}.
"""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from megatron_ciera import cpu  # noqa: E402

cpu.install()
cpu.install_megatron_patches()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_ciera.moe.groups import make_expert_group  # noqa: E402
from megatron_ciera.moe.layer import attach_dispatcher, attach_placement  # noqa: E402
from megatron_ciera.moe.optimizer_state import MASTER, OptimizerState  # noqa: E402
from megatron_ciera.moe.placements import PlacementInForce  # noqa: E402
from megatron_ciera.moe.sites import families, find_sites  # noqa: E402

EXPERTS, TOPK, SEQUENCE, VOCABULARY, CLIP = 8, 4, 32, 128, 0.5
BATCHES = 4


class Trained:
    """One model with its optimizer. `placement` is None for models that stay contiguous."""

    def __init__(self, dtype, dedup=False, placed=False):
        self.model, self.optimizer = _make(dtype)
        self.placement = None
        sites = find_sites([self.model])
        if dedup:
            for site in sites:
                attach_dispatcher(site.layer)
        if placed:
            mappings = {site.layer_id: attach_placement(site.layer) for site in sites}
            self.placement = PlacementInForce(sites, mappings, list(mappings), EXPERTS, make_expert_group())

    def step(self, iteration: int) -> tuple[float, float]:
        """Returns loss and gradient norm."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * iteration + dist.get_rank())
        # Half of the tokens repeat, so that there is something to learn.
        tokens = torch.randint(VOCABULARY // 4, (2, SEQUENCE + 1), generator=generator).repeat_interleave(
            2, 1
        )
        tokens = tokens[:, : SEQUENCE + 1]
        positions = torch.arange(SEQUENCE).expand(2, -1)
        losses = self.model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        loss = losses.float().mean()
        loss.backward()
        finalize_model_grads([self.model])
        _, norm, _ = self.optimizer.step()
        return loss.item(), float(norm)

    def make_moments(self) -> None:
        """Moments exist from the first step on: takes one that changes nothing, and makes them zero again."""
        groups = _groups(self.optimizer)
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        self.step(0)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"], group["step"] = rate, 0
        for part in OptimizerState(self.optimizer).optimizers:
            for state in part.optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name].zero_()

    def copy_from(self, source: "Trained", maps: dict) -> None:
        """Takes over the contiguous `source`'s state, then moves experts to `maps`."""
        if self.placement is not None:
            self.placement.move_to({}, OptimizerState(self.optimizer))
        state, given = OptimizerState(self.optimizer), OptimizerState(source.optimizer)
        pairs = list(zip(self.model.parameters(), source.model.parameters(), strict=True))
        for mine, theirs in pairs:
            mine.data.copy_(theirs.data)
        for mine, theirs in pairs:
            piece, wanted = state.piece(mine), given.piece(theirs)
            assert (piece is None) == (wanted is None)
            for name, values in wanted.states.items() if wanted else ():
                if name in piece.states:
                    piece.states[name].copy_(values)
                else:
                    # fp32 training has no masters: the model's own values are.
                    assert name == MASTER and mine.dtype == torch.float32
                    mine.data.view(-1)[piece.start : piece.stop] = values
        for mine, theirs in zip(_groups(self.optimizer), _groups(source.optimizer), strict=True):
            mine["step"] = theirs["step"]
        self.model.start_param_sync(force_sync=True)
        if self.placement is not None:
            self.placement.move_to(maps, OptimizerState(self.optimizer))

    def tensors(self) -> dict[str, np.ndarray]:
        """Masters and moments whole, on every rank: by parameter, experts by layer and number."""
        state, mine = OptimizerState(self.optimizer), {}
        expert_parameters = set()
        for site in find_sites([self.model]):
            first = parallel_state.get_expert_model_parallel_rank() * site.num_local_experts
            for family in families(site):
                for place, (parameter, _) in enumerate(family.owners):
                    expert_parameters.add(parameter)
                    slot = first + place
                    expert = int(self.placement.maps[site.layer_id][slot]) if self.placement else slot
                    mine[f"layer {site.layer_id.layer} {family.name}", expert] = _piece(state, parameter)
        for name, parameter in self.model.named_parameters():
            if parameter not in expert_parameters:
                mine[name, 0] = _piece(state, parameter)
        return _gathered(mine)


def _make(dtype):
    bf16 = dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=32,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=1e-2,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        normalization="RMSNorm",
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
    )
    torch.manual_seed(7)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    spec = get_gpt_layer_local_spec(EXPERTS, False, normalization="RMSNorm")
    gpt = GPTModel(config, spec, VOCABULARY, SEQUENCE, position_embedding_type="rope")
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
        gpt.to(dtype),
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=3e-3,
        bf16=bf16,
        params_dtype=dtype,
        clip_grad=CLIP,
        use_distributed_optimizer=True,
    )
    return model, get_megatron_optimizer(settings, [model])


def _groups(optimizer) -> list[dict]:
    state = OptimizerState(optimizer)
    return [group for part in state.optimizers for group in part.optimizer.param_groups if group["params"]]


def _piece(state: OptimizerState, parameter) -> tuple:
    piece = state.piece(parameter)
    if piece is None:
        return 0, 0, parameter.numel(), {}
    states = {name: values.numpy() for name, values in piece.states.items()}
    # With fp32 weights the masters are the weights.
    states.setdefault(MASTER, parameter.data.view(-1)[piece.start : piece.stop].float().numpy())
    return piece.start, piece.stop, parameter.numel(), states


def _gathered(mine: dict) -> dict[str, np.ndarray]:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {}
    for part in everyone:
        for (name, expert), (start, stop, numel, states) in part.items():
            for state, values in states.items():
                where = whole.setdefault(f"{name} {state}", {})
                where.setdefault(expert, np.full(numel, np.nan))[start:stop] = values
    stacked = {name: np.stack([by[expert] for expert in sorted(by)]) for name, by in whole.items()}
    assert not any(np.isnan(values).any() for values in stacked.values())
    return stacked


def _compare(kept, plain, exact, ours, iteration, rng) -> dict:
    """Steps of all models from the state of `kept`, over several batches."""
    layers = ours["placed"].placement.maps
    models = {"plain": plain, "exact": exact, **ours}
    losses, norms, squares = {}, {}, {}
    for batch in range(BATCHES):
        maps = {layer_id: rng.permutation(EXPERTS) for layer_id in layers}
        for name, model in models.items():
            model.copy_from(kept, maps)
            loss, norm = model.step(1000 * (batch + 1) + iteration)
            losses.setdefault(name, []).append(loss)
            norms.setdefault(name, []).append(norm)
        wanted = exact.tensors()
        for name, model in models.items():
            of_model = squares.setdefault(name, dict.fromkeys(wanted, 0.0))
            for key, found in model.tensors().items():
                of_model[key] += float(np.square(found.astype(np.float64) - wanted[key]).sum())
    errors = {name: {key: value**0.5 for key, value in found.items()} for name, found in squares.items()}
    return {"losses": losses, "norms": norms, "errors": errors}


def main(out: Path, expert_parallel: int, iterations: list[int]) -> None:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=expert_parallel)
    plain, kept, exact = Trained(torch.bfloat16), Trained(torch.bfloat16), Trained(torch.float32)
    ours = {
        "placed": Trained(torch.bfloat16, placed=True),
        "placed and deduplicated": Trained(torch.bfloat16, dedup=True, placed=True),
        "deduplicated": Trained(torch.bfloat16, dedup=True),
    }
    for model in (plain, kept, exact, *ours.values()):
        model.make_moments()
    rng, results = np.random.default_rng(0), {}
    for iteration in range(max(iterations) + 1):
        if iteration not in iterations:
            plain.step(iteration)
            continue
        kept.copy_from(plain, {})
        results[iteration] = _compare(kept, plain, exact, ours, iteration, rng)
        plain.copy_from(kept, {})
        plain.step(iteration)
    if dist.get_rank() == 0:
        (out / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
