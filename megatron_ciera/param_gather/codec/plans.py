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
    """The blocks of segments of given lengths. Kernels that need masks for tails launch them apart from whole
    blocks; others take ``every``, where a segment without values has one empty block."""

    whole: BlockList
    tails: BlockList
    every: BlockList


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Upload without waiting: the pinned copy is kept by torch's host allocator until the stream has
    passed."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def list_blocks(counts: Sequence[int], device: torch.device) -> Blocks:
    """The blocks of segments with these numbers of values."""
    lengths = np.array(counts, np.int64)
    whole, tails = lengths // HASH_BLOCK, np.flatnonzero(lengths % HASH_BLOCK)
    parts = [*_numbered(whole), tails, whole[tails], *_numbered(np.maximum(-(-lengths // HASH_BLOCK), 1))]
    uploaded = to_device(np.concatenate(parts).astype(np.int32), device)
    split = torch.tensor_split(uploaded, np.cumsum([part.size for part in parts])[:-1].tolist())
    return Blocks(*(BlockList(*split[first : first + 2]) for first in (0, 2, 4)))


def _numbered(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(segment, index in the segment) of every block, for these numbers of blocks a segment."""
    segment = np.repeat(np.arange(blocks.size), blocks)
    return segment, np.arange(segment.size) - np.repeat(np.cumsum(blocks) - blocks, blocks)


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
