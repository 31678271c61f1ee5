"""Device tables for batched kernels: which block belongs to which segment, and where segments lie in
memory."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .words import HASH_BLOCK

_KEPT = 256


@dataclass(frozen=True)
class BlockList:
    """Blocks of one launch: int32 [n] segment of each block, and its index in the segment."""

    segment: torch.Tensor
    index: torch.Tensor

    def __len__(self) -> int:
        return self.segment.numel()


@dataclass(frozen=True)
class Blocks:
    """The blocks of segments of given lengths. Whole blocks and tails are launched apart: tails need
    masks."""

    whole: BlockList
    tails: BlockList
    region_segment: torch.Tensor  # int32 [regions], at least one a segment
    first_region: np.ndarray  # int64 [segments]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Upload without waiting: the pinned copy is kept by torch's host allocator until the stream has
    passed."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def list_blocks(counts: Sequence[int], region_values: int, device: torch.device) -> Blocks:
    """The blocks of segments with these numbers of values; a region is ``region_values`` values of one
    segment."""
    lengths, segments = np.array(counts, np.int64), np.arange(len(counts))
    whole, tails = lengths // HASH_BLOCK, np.flatnonzero(lengths % HASH_BLOCK)
    whole_segment = np.repeat(segments, whole)
    whole_index = np.arange(whole_segment.size) - np.repeat(np.cumsum(whole) - whole, whole)
    regions = np.maximum(-(-lengths // region_values), 1)
    parts = [whole_segment, whole_index, tails, whole[tails], np.repeat(segments, regions)]
    uploaded = to_device(np.concatenate(parts).astype(np.int32), device)
    split = torch.tensor_split(uploaded, np.cumsum([part.size for part in parts])[:-1].tolist())
    return Blocks(
        BlockList(split[0], split[1]), BlockList(split[2], split[3]), split[4], np.cumsum(regions) - regions
    )


def is_aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors start at multiples of 16 bytes, so that kernels may load vectors."""
    return all(tensor.data_ptr() % 16 == 0 for tensor in tensors)


class Kept:
    """What was built for a key, the least recently used one dropped. Not safe across threads."""

    def __init__(self):
        self._items: OrderedDict[tuple, object] = OrderedDict()

    def get(self, key: tuple, build: Callable):
        item = self._items.pop(key, None)
        if item is None:
            item = build()
        self._items[key] = item
        if len(self._items) > _KEPT:
            self._items.popitem(last=False)
        return item
