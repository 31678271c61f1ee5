"""Keeps the routing of some tokens of one iteration, on the device until it is collected."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from placement.file import LayerId


class RouteRecorder:
    """Records the first `wanted` tokens that one layer routes while armed. Logical expert numbers."""

    def __init__(self, topk: int):
        self.topk = topk
        self._wanted = 0
        self._kept: list[torch.Tensor] = []

    def arm(self, wanted: int) -> None:
        """Starts anew, for `wanted` tokens."""
        self._wanted, self._kept = wanted, []

    def add(self, routing_map: torch.Tensor) -> None:
        """[T, E] bool. Copies the tokens still wanted; no host synchronisation."""
        missing = self._wanted - sum(len(part) for part in self._kept)
        if missing > 0:
            self._kept.append(routing_map[:missing].clone())

    def take(self) -> np.ndarray:
        """[tokens, topk] int16 experts in ascending order, and disarms. Tokens that lost experts to a
        capacity are left out. NOTE: device-to-host copy."""
        kept, self._wanted, self._kept = self._kept, 0, []
        if not kept:
            return np.empty((0, self.topk), dtype=np.int16)
        routed = torch.cat(kept).cpu().numpy()
        routed = routed[routed.sum(1) == self.topk]
        return routed.nonzero()[1].reshape(-1, self.topk).astype(np.int16)


def collect(
    recorders: Mapping[LayerId, RouteRecorder], layer_ids: Sequence[LayerId]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Gathers what all ranks recorded on rank 0. Collective.

    Returns (fit tokens, held-out tokens), each [layers, tokens, topk], on rank 0 and None elsewhere: of every
    rank's tokens the first half goes to the fit. Layers are cut to the fewest tokens that any has.

    Raises:
        RuntimeError: on rank 0 alone, when a rank could not read what it recorded.
    """
    mine, failure = {}, None
    try:
        mine = {layer_id: recorder.take() for layer_id, recorder in recorders.items()}
    except Exception as error:
        # The others are on their way into the collective.
        failure = f"{type(error).__name__}: {error}"
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((mine, failure), everyone, dst=0)
    if everyone is None:
        return None
    for rank, (_, why) in enumerate(everyone):
        if why is not None:
            raise RuntimeError(f"rank {rank} could not collect its routing: {why}")
    halves = [[], []]
    for layer_id in layer_ids:
        parts = [found[layer_id] for found, _ in everyone if layer_id in found]
        halves[0].append(np.concatenate([part[: (len(part) + 1) // 2] for part in parts]))
        halves[1].append(np.concatenate([part[(len(part) + 1) // 2 :] for part in parts]))
    fewest = [min(len(tokens) for tokens in half) for half in halves]
    return tuple(np.stack([tokens[:n] for tokens in half]) for half, n in zip(halves, fewest, strict=True))
