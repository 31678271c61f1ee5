"""Samples of the own shard by class, encoded with every codec: how fast parameters change, and what that would cost.

A sample is taken before the optimizer step that it measures, so no state of a whole segment is needed. Its counts
travel in the size exchange; nothing here waits for the device.
"""

from collections.abc import Mapping, Sequence

import torch

from megatron_ciera.param_gather.codec import Codec
from megatron_ciera.param_gather.codec.words import FORMATS
from megatron_ciera.param_gather.selection import ClassStats

SAMPLE_VALUES = 1 << 16
SAMPLES_PER_CLASS = 4
_COUNTS = ("values", "same", "exponent_changed", "blocks", "blocks_changed")


class Probe:
    """Measures one step.

    Args:
        segments: own segments as (class, words view).
        kinds: classes of the group, in one order on all ranks; a rank without one contributes zeros.
        codecs: those to compare.
        block_size: values of an exponent block.
    """

    def __init__(
        self,
        segments: Sequence[tuple[str, torch.Tensor]],
        kinds: Sequence[str],
        codecs: Mapping[str, Codec],
        dtype: torch.dtype,
        block_size: int,
    ):
        self.kinds, self.codecs = list(kinds), dict(codecs)
        self._block_size = block_size
        self._format = FORMATS[dtype]
        self._views: list[tuple[str, torch.Tensor]] = []
        for kind in self.kinds:
            largest = sorted((w for k, w in segments if k == kind), key=lambda words: -words.numel())
            self._views += [(kind, words[:SAMPLE_VALUES]) for words in largest[:SAMPLES_PER_CLASS]]
        # Kept for good: they are written on the compute stream and read on the lane.
        self._before: list[torch.Tensor] | None = None
        self._ready = False

    @property
    def num_counts(self) -> int:
        """Length of what `measure` writes."""
        return len(self.kinds) * (len(_COUNTS) + len(self.codecs))

    @property
    def num_bytes(self) -> int:
        """Memory of the samples held now."""
        return sum(before.nbytes for before in self._before or ())

    @property
    def ready(self) -> bool:
        return self._ready

    def remember(self) -> None:
        """Copies the samples as they are, on the current stream."""
        if self._before is None:
            self._before = [words.clone() for _, words in self._views]
        else:
            for before, (_, words) in zip(self._before, self._views, strict=True):
                before.copy_(words)
        self._ready = True

    def measure(self, out: torch.Tensor) -> None:
        """Counts what changed since `remember` and encodes it; int64 `[num_counts]`, on the samples' device."""
        out.zero_()
        table = out.view(len(self.kinds), -1)
        for index, codec in enumerate(self.codecs.values()):
            for row, size in zip(self._rows(), self._encode(codec), strict=True):
                table[row, len(_COUNTS) + index] += size
        for row, before, (_, words) in zip(self._rows(), self._before, self._views, strict=True):
            changed = self._exponent(before) != self._exponent(words)
            pad = -changed.numel() % self._block_size
            blocks = torch.nn.functional.pad(changed, (0, pad)).view(-1, self._block_size).any(dim=1)
            table[row, 0] += words.numel()
            table[row, 1] += (before == words).sum()
            table[row, 2] += changed.sum()
            table[row, 3] += blocks.numel()
            table[row, 4] += blocks.sum()
        self._ready = False

    def stats(self, counts: torch.Tensor) -> dict[str, ClassStats]:
        """The classes' statistics from the counts of all ranks, int64 `[ranks, num_counts]` on the host."""
        table = counts.sum(dim=0).view(len(self.kinds), -1).tolist()
        found = {}
        for kind, row in zip(self.kinds, table, strict=True):
            coded = dict(zip(self.codecs, row[len(_COUNTS) :], strict=True))
            found[kind] = ClassStats(**dict(zip(_COUNTS, row, strict=False)), coded_bytes=coded)
        return found

    def _rows(self) -> list[int]:
        return [self.kinds.index(kind) for kind, _ in self._views]

    def _encode(self, codec: Codec) -> torch.Tensor:
        words = [words for _, words in self._views]
        states = [codec.new_state(before) for before in self._before]
        outs = [torch.empty(codec.bound(w.numel()), dtype=torch.uint8, device=w.device) for w in words]
        sizes = torch.zeros(len(words), dtype=torch.int64, device=words[0].device)
        codec.encode_many(words, states, outs, sizes)
        return sizes

    def _exponent(self, words: torch.Tensor) -> torch.Tensor:
        mask = (1 << self._format.exponent_bits) - 1
        return (words >> self._format.exponent_shift) & mask
