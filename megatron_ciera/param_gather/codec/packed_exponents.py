"""`exponent-reuse` with the `packed` coder in plain torch: the twin of kernels/exponents_packed.py.

A block is coded by itself: bitmap of changed exponent blocks, sign+mantissa of all values, and for changed
exponent blocks a nibble top - exponent a value, 15 meaning an escape. Bytes: docs/codec.md.
"""

import numpy as np
import torch

from .exponent_reuse_cpu import pack_rest, unpack_rest
from .packed_format import NUM_ESCAPES_RAW
from .packed_reference import PackedReference
from .words import HASH_BLOCK, exponent_hashes, exponents

TOP_ABOVE_MEAN = 4
ESCAPE_NIBBLE = 15


def check_block_size(block_size: int) -> None:
    """The kernels work on rows of 8 values: exponent blocks must be a power of two of 16 to HASH_BLOCK
    values."""
    if not 16 <= block_size <= HASH_BLOCK or block_size & (block_size - 1):
        raise ValueError(
            f"--ciera-block-size {block_size}: on a GPU and with coder packed wanted a power of two "
            f"from 16 to {HASH_BLOCK}"
        )


def whole_words(array: np.ndarray) -> np.ndarray:
    """The bytes of an array, padded with zeros to a multiple of 4."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.concatenate([data, np.zeros(-data.size % 4, np.uint8)])


class PackedExponentReuse(PackedReference):
    """State: int64 [num_blocks, 2], the bits of the 128-bit exponent hash of each exponent block."""

    name = "exponent-reuse"

    def __init__(self, dtype, block_size, device):
        check_block_size(block_size)
        super().__init__(dtype, block_size, device)

    def num_blocks(self, num_values: int) -> int:
        return -(-num_values // self.block_size)

    def state_bytes(self, num_values):
        return 16 * self.num_blocks(num_values)

    def new_state(self, words):
        state = torch.empty(self.num_blocks(words.numel()), 2, dtype=torch.int64, device=words.device)
        self.update_state(words, state)
        return state

    def update_state(self, words, state):
        exponent = exponents(words.numpy().view(self.fmt.numpy_dtype), self.fmt)
        state.copy_(torch.from_numpy(exponent_hashes(exponent, self.block_size).view(np.int64)))

    def encode_blocks(self, new, state):
        words = new.numpy().view(self.fmt.numpy_dtype)
        exponent = exponents(words, self.fmt)
        changed = (exponent_hashes(exponent, self.block_size) != state.numpy().view(np.uint64)).any(axis=1)
        per_hash_block = HASH_BLOCK // self.block_size
        for first in range(0, words.size, HASH_BLOCK):
            place = first // self.block_size
            part = slice(first, first + HASH_BLOCK)
            yield self._encode_block(words[part], exponent[part], changed[place : place + per_hash_block])

    def _encode_block(self, words: np.ndarray, exponent: np.ndarray, changed: np.ndarray):
        largest = (1 << self.fmt.exponent_bits) - 1
        top = min(int(exponent.sum(dtype=np.int64)) // exponent.size + TOP_ABOVE_MEAN, largest)
        below = (top - exponent.astype(np.int32)) & largest
        moved = np.repeat(changed, self.block_size)[: words.size]
        escaped = np.flatnonzero(moved & (below >= ESCAPE_NIBBLE))
        nibbles = np.zeros(changed.size * self.block_size, np.uint8)
        nibbles[: words.size] = np.minimum(below, ESCAPE_NIBBLE)
        nibbles = nibbles.reshape(changed.size, self.block_size)[changed].reshape(-1)
        escapes = (escaped | exponent[escaped].astype(np.int64) << 16).astype("<u4")
        parts = [
            np.packbits(changed, bitorder="little"),
            *self._rest_parts(words),
            nibbles[0::2] | nibbles[1::2] << 4,
            escapes,
        ]
        return np.concatenate([whole_words(part) for part in parts]), min(
            escaped.size, NUM_ESCAPES_RAW
        ) | top << 16

    def _rest_parts(self, words: np.ndarray) -> list[np.ndarray]:
        """Sign and mantissa: bytes, then (fp16) three bit planes or (fp32) lower halves, each in whole
        words."""
        if self.fmt.exponent_shift == 23:
            rest = np.pad(pack_rest(words, self.fmt).reshape(-1, 3), ((0, 0), (0, 1))).view("<u4").reshape(-1)
            return [(rest >> 16).astype(np.uint8), rest.astype("<u2")]
        packed = pack_rest(words, self.fmt)
        planes = packed[words.size :]
        return [packed[: words.size], *(planes.reshape(3, -1) if planes.size else ())]

    def _take_rest(self, take, count: int) -> np.ndarray:
        """Inverse of :meth:`_rest_parts`: words with a zero exponent field."""
        low = take(count)
        if self.fmt.exponent_shift == 23:
            halves = take(2 * count).view("<u2")
            packed = (
                np.stack([halves & 0xFF, halves >> 8, low.astype("<u2")], axis=1).astype(np.uint8).reshape(-1)
            )
        elif self.fmt.exponent_shift == 10:
            packed = np.concatenate([low, *(take(-(-count // 8)) for _ in range(3))])
        else:
            packed = low
        return unpack_rest(packed, count, self.fmt)

    def decode_block(self, coded, descriptor, old):
        num_escapes, top = descriptor & 0xFFFF, descriptor >> 16 & 0xFF
        count, position = old.numel(), 0

        def take(num_bytes: int) -> np.ndarray:
            nonlocal position
            start, position = position, position + -(-num_bytes // 4) * 4
            if position > coded.size:
                raise IndexError
            return coded[start : start + num_bytes]

        largest = (1 << self.fmt.exponent_bits) - 1
        num_blocks = self.num_blocks(count)
        try:
            changed = np.unpackbits(take(-(-num_blocks // 8)), count=num_blocks, bitorder="little").astype(
                bool
            )
            rest = self._take_rest(take, count)
            pairs = take(np.count_nonzero(changed) * self.block_size // 2)
            escapes = take(4 * num_escapes).copy().view("<u4")
        except IndexError:
            return None
        places = escapes & 0xFFFF
        if (places >= count).any():
            return None
        nibbles = np.zeros((num_blocks, self.block_size), np.uint8)
        nibbles[changed] = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1, self.block_size)
        exponent = exponents(old.numpy().view(self.fmt.numpy_dtype), self.fmt)
        moved = np.repeat(changed, self.block_size)[:count]
        coded_exponent = ((top - nibbles.reshape(-1)[:count].astype(np.int32)) & largest).astype(np.uint8)
        exponent = np.where(moved, coded_exponent, exponent)
        exponent[places] = escapes >> 16
        words = rest | exponent.astype(rest.dtype) << rest.dtype.type(self.fmt.exponent_shift)
        return torch.from_numpy(words.view({2: np.int16, 4: np.int32}[self.fmt.itemsize]))
