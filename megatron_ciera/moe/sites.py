"""Where the MoE layers of this rank are: their global numbers, and their experts' parameters slot by slot."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megatron_ciera.moe.optimizer_state import OptimizerState
from placement.file import DECODER, MTP, LayerId


@dataclass(frozen=True, eq=False)
class Site:
    """One MoE layer of this rank."""

    layer_id: LayerId
    layer: MoELayer

    @property
    def num_experts(self) -> int:
        return self.layer.config.num_moe_experts

    @property
    def num_local_experts(self) -> int:
        return self.layer.num_local_experts


def find_sites(model_chunks: list) -> list[Site]:
    """All MoE layers of this rank's chunks, decoder layers first, by global number (0-based)."""
    sites = []
    for chunk in model_chunks:
        in_mtp = {}
        for module in chunk.modules():
            if isinstance(module, MultiTokenPredictionLayer):
                inner = [part for part in module.modules() if isinstance(part, MoELayer)]
                for index, layer in enumerate(inner):
                    in_mtp[layer] = LayerId(MTP, module.layer_number - 1, index)
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                layer_id = in_mtp.get(module) or LayerId(DECODER, module.layer_number - 1)
                sites.append(Site(layer_id, module))
    return sorted(sites, key=lambda site: site.layer_id)


@dataclass(frozen=True, eq=False)
class Family:
    """The same parameter of every local expert, in slot order, as [n] flat views of one numel.

    `owners[slot]` is (module parameter, first value in it): several slots of one grouped parameter share it.
    """

    name: str
    owners: list[tuple[torch.nn.Parameter, int]]
    numel: int

    def value(self, slot: int) -> torch.Tensor:
        """Flat view of the model's values of `slot`; writing it writes the model."""
        parameter, start = self.owners[slot]
        return parameter.data.view(-1)[start : start + self.numel]


def families(site: Site) -> list[Family]:
    """Every parameter of a layer's experts, grouped over slots.

    Raises:
        ValueError: the experts are of a class that this package does not know.
    """
    experts, count = site.layer.experts, site.num_local_experts
    if isinstance(experts, SequentialMLP):
        named = [dict(expert.named_parameters()) for expert in experts.local_experts]
        return [
            Family(name, [(parameters[name], 0) for parameters in named], named[0][name].numel())
            for name in named[0]
        ]
    return list(_grouped_families(site, dict(experts.named_parameters()), count))


def expert_bytes(site: Site, optimizer: OptimizerState, replicas: int) -> int:
    """Bytes that moving one expert sends: weights of every replica, sharded masters and moments."""
    total = 0
    for family in families(site):
        parameter = family.owners[0][0]
        per_value = parameter.element_size() * replicas
        for owner, _ in family.owners:
            piece = optimizer.piece(owner)
            if piece is not None:
                per_value += sum(state.element_size() for state in piece.states.values())
                break
        total += family.numel * per_value
    return total


def _grouped_families(site: Site, parameters: dict, count: int) -> Iterator[Family]:
    remaining = dict(parameters)
    for name in parameters:
        stem = name.rstrip("0123456789")
        if name in remaining and stem != name and f"{stem}{count - 1}" in remaining:
            members = [remaining.pop(f"{stem}{slot}") for slot in range(count)]
            yield Family(stem, [(member, 0) for member in members], members[0].numel())
    for name, parameter in remaining.items():
        if parameter.numel() % count or parameter.shape[0] % count:
            raise ValueError(
                f"--correlated-placement: {site.layer_id}: parameter {name} of {type(site.layer.experts).__name__} "
                f"has shape {list(parameter.shape)}, which does not divide over {count} local experts. "
                "Use SequentialMLP or TEGroupedMLP experts, or leave out --correlated-placement."
            )
        size = parameter.numel() // count
        yield Family(name, [(parameter, slot * size) for slot in range(count)], size)
