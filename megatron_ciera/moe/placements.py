"""The placement in force: which expert is in which slot of every MoE layer of the model, and how it changes."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron_ciera.moe.agreement import agree
from megatron_ciera.moe.groups import ExpertGroup
from megatron_ciera.moe.migration import MigrationError, migrate
from megatron_ciera.moe.optimizer_state import OptimizerState
from megatron_ciera.moe.sites import Site
from placement.file import LayerId, LayerPlacement, Placement

Maps = Mapping[LayerId, np.ndarray]


class PlacementInForce:
    """Contiguous at first. `maps`: layer -> [E] int64 physical_to_logical_map, of the whole model, on every rank.

    mappings: the buffers of this rank's layers, which dispatch reads.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        mappings: Mapping[LayerId, torch.Tensor],
        layer_ids: Sequence[LayerId],
        num_experts: int,
        group: ExpertGroup,
    ):
        self.sites = sites
        self.mappings = mappings
        self.group = group
        self.num_experts = num_experts
        self.maps = {layer_id: np.arange(num_experts) for layer_id in layer_ids}

    def changed_layers(self, maps: Maps) -> list[LayerId]:
        """Layers whose map would change by `move_to(maps)`."""
        return [
            layer for layer, map_ in self.maps.items() if not np.array_equal(map_, self._wanted(maps, layer))
        ]

    def move_to(self, maps: Maps, optimizer: OptimizerState) -> int:
        """Migrates every layer whose map differs; layers missing in `maps` become contiguous.

        Returns the bytes that this rank received. Collective over all ranks, between steps, with parameters
        gathered.

        Raises:
            ValueError: on every rank, when a layer could not be moved; layers before it were moved whole.
        """
        received, failure = 0, None
        try:
            for site in self.sites:
                new = self._wanted(maps, site.layer_id)
                received += migrate(site, self.mappings[site.layer_id], new, optimizer, self.group)
        except MigrationError as error:
            failure = error
        agree("--correlated-placement", None, failure, "")
        self.maps = {layer_id: self._wanted(maps, layer_id) for layer_id in self.maps}
        return received

    def document(self, topk: int, expert_parallel_size: int, ranks_per_node: int, fit: dict) -> dict:
        """The placement in force as a placement file's document, for checkpoints."""
        layers = tuple(LayerPlacement(layer_id, map_) for layer_id, map_ in self.maps.items())
        placement = Placement(self.num_experts, topk, expert_parallel_size, ranks_per_node, layers, fit)
        placement.validate()
        return placement.to_document()

    def _wanted(self, maps: Maps, layer_id: LayerId) -> np.ndarray:
        return np.asarray(maps.get(layer_id, np.arange(self.num_experts)), dtype=np.int64)
