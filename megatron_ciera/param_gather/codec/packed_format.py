"""The `packed` format: constants that the plain-torch twin and the Triton kernels share. Bytes:
docs/codec.md.

How it codes a difference. z = zigzag(code(new) - code(old)) is small when the update is small against the
value, and an update of the same absolute size is half as many last places for every step of the old exponent
e. So two widths follow from e alone: a = clip(c1 - e) bits for z < 2^a (flag 0), b = clip(c2 - e) bits for
the next 2^b values (flag 1); what is larger is an escape. Both ends know e, flags stand at fixed places, and
one prefix sum of widths finds every code. c1 and c2 are chosen for each region from a sample.
"""

from dataclasses import dataclass

import numpy as np
import torch

from .words import HASH_BLOCK, WordFormat

REGION_BLOCKS = 64  # hash blocks that share one choice of (c1, c2)
SAMPLE_RUNS, SAMPLE_LANES = 32, 16  # a region is sampled in runs of neighbouring values
NUM_SCALES, NUM_GAPS = 8, 4  # candidates: c2 = mean - 1 + 0..7, c1 = c2 - 1, c2 - 2, c2 - 3 or 0
ESCAPE_BITS = 32
NUM_ESCAPES_RAW, NUM_ESCAPES_SAME = 0xFFFF, 0xFFFE  # block modes, told apart by the number of escapes
DESCRIPTOR_BYTES = 8
TAIL_BYTES = 8  # zeros behind the last block: a decoder reads whole words, up to two beyond its codes


@dataclass(frozen=True)
class PackedShape:
    """How the 16-bit (half) words of one format are coded; the codes of a chunk fit into 32 bits."""

    chunk: int  # values a chunk: the kernels' step in the bit stream
    max_a: int
    max_b: int
    exponent_shift: int
    exponent_mask: int
    halves: bool  # fp32: the upper halves are coded, the lower ones follow as they are


def packed_shape(fmt: WordFormat) -> PackedShape:
    if fmt.torch_dtype is torch.float16:
        return PackedShape(2, 10, 11, 10, 31, False)
    return PackedShape(4, 7, 8, 7, 255, fmt.itemsize == 4)


def body_start(num_values: int) -> int:
    """First byte after header, hashes and block descriptors, a multiple of 16."""
    num_blocks = -(-num_values // HASH_BLOCK)
    return -(-(64 + (4 + DESCRIPTOR_BYTES) * num_blocks) // 16) * 16


def packed_bound(num_values: int, fmt: WordFormat) -> int:
    """Bytes that any packed payload fits into: every block raw, the last one rounded up to 4 bytes."""
    return body_start(num_values) + -(-(num_values * fmt.itemsize + 4 + TAIL_BYTES) // 16) * 16


def bitmap_bytes(num_values: int) -> int:
    """Bytes of the flag bitmap of one block with this many values: whole 32-bit words."""
    return 4 * -(-num_values // 32)


def sample_positions(count: int) -> np.ndarray:
    """Positions inside a region of ``count`` values that decide c1 and c2; may repeat in short regions."""
    runs = np.arange(SAMPLE_RUNS) * (count // SAMPLE_RUNS)
    positions = (runs[:, None] + np.arange(SAMPLE_LANES)).reshape(-1)
    return positions[positions < count]
