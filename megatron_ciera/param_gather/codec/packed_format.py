"""The `packed` format: constants that the plain-torch twin and the Triton kernels share. Bytes:
docs/codec.md.

How `delta` codes a difference. z = zigzag(new - old modulo 2^16) is small when the update is small against the
value, and an update of the same absolute size is half as many last places for every step of the old exponent
e. So two widths follow from e alone: b = clip(centre - e, 0, max_width) and a = max(b - step, 0). A value with
z < 2^a takes a bits, one of the next 2^b values takes b bits, flags tell them apart, and what is larger
becomes a record. Each of LANES lanes codes its VALUES values by itself into whole bytes.
"""

from dataclasses import dataclass

import torch

from .words import HASH_BLOCK, HASH_LANES, WordFormat

LANES = HASH_LANES
VALUES = HASH_BLOCK // LANES  # of a lane
SAMPLED = (0, 1, 32, 33)  # values of every lane that decide centre and step
DENSE_STEP, SPARSE_STEP = 2, 15
POSITION_BITS = 12
NUM_ESCAPES_RAW, NUM_ESCAPES_SAME = 0xFFFF, 0xFFFE  # block modes, told apart by the number of records
DESCRIPTOR_BYTES = 8
TAIL_BYTES = 96  # zeros behind the last block: a decoder reads whole words, up to 23 after a lane's first


@dataclass(frozen=True)
class PackedShape:
    """How the 16-bit (half) words of one format are coded; the codes of a chunk fit into 32 bits."""

    chunk: int  # values a chunk: the kernels' step in the bit stream
    max_width: int
    exponent_shift: int
    exponent_mask: int
    halves: bool  # fp32: the upper halves are coded, the lower ones follow as they are


def packed_shape(fmt: WordFormat) -> PackedShape:
    if fmt.torch_dtype is torch.float16:
        return PackedShape(2, 11, 10, 31, False)
    return PackedShape(4, 8, 7, 255, fmt.itemsize == 4)


def body_start(num_values: int) -> int:
    """First byte after header, hashes and block descriptors, a multiple of 16."""
    num_blocks = -(-num_values // HASH_BLOCK)
    return -(-(64 + (4 + DESCRIPTOR_BYTES) * num_blocks) // 16) * 16


def packed_bound(num_values: int, fmt: WordFormat) -> int:
    """Bytes that any packed payload fits into: every block raw, the last one rounded up to 4 bytes."""
    return body_start(num_values) + -(-(num_values * fmt.itemsize + 4 + TAIL_BYTES) // 16) * 16
