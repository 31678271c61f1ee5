"""How much of a model changes in a step, and what each codec makes of it, by really encoding and decoding.

Reproduces the CIERA paper's observations on any two snapshots: exponent change rate of values (O2), of whole
shards against shard size (Fig. 3a, O3) and of blocks by tensor class (Fig. 3b and 4, O4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from . import make_codec
from .base import new_flags
from .words import exponents, word_format

SMALL_BLOCK = 64  # reported beside the chosen block size
SHARD_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CODECS = {
    "exponent_reuse": ("exponent-reuse", "ans"),
    "delta": ("delta", "ans"),
    "delta_packed": ("delta", "packed"),
}


@dataclass
class Tally:
    """Sums over parameters of one class."""

    values: int = 0
    same: int = 0
    exponents_changed: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    blocks_changed: dict[int, int] = field(default_factory=dict)
    payload_bytes: dict[str, int] = field(default_factory=dict)
    shards_changed: dict[int, list[int]] = field(default_factory=dict)

    def add(self, other: "Tally") -> None:
        self.values += other.values
        self.same += other.same
        self.exponents_changed += other.exponents_changed
        for mine, theirs in (
            (self.blocks, other.blocks),
            (self.blocks_changed, other.blocks_changed),
            (self.payload_bytes, other.payload_bytes),
        ):
            for key, value in theirs.items():
                mine[key] = mine.get(key, 0) + value
        for count, changed in other.shards_changed.items():
            self.shards_changed.setdefault(count, []).extend(changed)

    def report(self) -> dict:
        """The JSON object of one class: rates as fractions, bits of all payload bytes a value."""
        return {
            "values": self.values,
            "same_value_rate": self.same / self.values,
            "exponent_change_rate": self.exponents_changed / self.values,
            "block_change_rate": {
                str(size): self.blocks_changed[size] / self.blocks[size] for size in self.blocks
            },
            "bits_per_value": {name: 8 * size / self.values for name, size in self.payload_bytes.items()},
        }


def measure_parameter(
    old: torch.Tensor, new: torch.Tensor, dtype: torch.dtype, block_size: int
) -> tuple[Tally, bool]:
    """The tally of one parameter's words, and whether every codec brought the old bits to the new ones."""
    fmt = word_format(dtype)
    old_words, new_words = (words.numpy().view(fmt.numpy_dtype) for words in (old, new))
    moved = exponents(old_words, fmt) != exponents(new_words, fmt)
    tally = Tally(old.numel(), int((old_words == new_words).sum()), int(moved.sum()))
    for size in dict.fromkeys((SMALL_BLOCK, block_size)):
        starts = np.arange(0, moved.size, size)
        tally.blocks[size] = starts.size
        tally.blocks_changed[size] = int(np.logical_or.reduceat(moved, starts).sum())
    for count in SHARD_COUNTS:
        if count <= moved.size:
            tally.shards_changed[count] = [int(part.any()) for part in np.array_split(moved, count)]
    exact = True
    for label, (name, coder) in CODECS.items():
        payload, right = encode_and_decode(make_codec(name, coder, dtype, block_size), old, new)
        tally.payload_bytes[label] = payload
        exact &= right
    return tally, exact


def encode_and_decode(codec, old: torch.Tensor, new: torch.Tensor) -> tuple[int, bool]:
    """Payload bytes, and whether decoding onto the old words gave exactly the new ones with no block
    flagged."""
    out = torch.empty(codec.bound(new.numel()), dtype=torch.uint8)
    size, target, flags = torch.zeros(1, dtype=torch.int64), old.clone(), new_flags(1, "cpu")
    codec.encode(new, codec.new_state(old), out, size)
    codec.decode_apply(out[: int(size)], target, flags)
    return int(size), bool(torch.equal(target, new)) and int(flags[0, 0]) == 0


def measure(pairs: Sequence, classify, block_size: int) -> dict:
    """The report on (name, dtype, old words, new words) pairs; ``classify`` gives the class of a name."""
    total, classes, exact = Tally(), {}, True
    for name, dtype, old, new in pairs:
        tally, right = measure_parameter(old, new, dtype, block_size)
        exact &= right
        total.add(tally)
        classes.setdefault(classify(name), Tally()).add(tally)
    shards = {str(count): float(np.mean(changed)) for count, changed in sorted(total.shards_changed.items())}
    return {
        "bitwise_exact": exact,
        "block_size": block_size,
        "total": total.report(),
        "classes": {kind: classes[kind].report() for kind in sorted(classes)},
        "shard_change_rate": shards,
    }
