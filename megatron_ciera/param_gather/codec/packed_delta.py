"""`delta` with the `packed` coder in plain torch: the twin of kernels/delta_packed_*.py, and its CPU path."""

import numpy as np
import torch

from .packed_format import (
    ESCAPE_BITS,
    NUM_ESCAPES_SAME,
    NUM_GAPS,
    NUM_SCALES,
    REGION_BLOCKS,
    TAIL_BYTES,
    bitmap_bytes,
    packed_shape,
    sample_positions,
)
from .packed_reference import PackedReference
from .words import HASH_BLOCK


def signed_code(half: torch.Tensor) -> torch.Tensor:
    """Ordered code (int32, in int16's range) of 16-bit words given as int32 of any upper bits."""
    signed = (half << 16) >> 16
    return signed ^ ((signed >> 31) & 0x7FFF)


def zigzag(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, 3, 4 … for code differences 0, -1, 1, -2, 2 …"""
    difference = signed_code(new) - signed_code(old)
    return (difference << 1) ^ (difference >> 31)


def apply_zigzag(z: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`zigzag`: the new 16-bit word, as int32 in [0, 65535]."""
    difference = (z >> 1) ^ -(z & 1)
    code = signed_code(old) + difference
    return (code ^ ((code >> 31) & 0x7FFF)) & 0xFFFF


def bit_length(z: torch.Tensor) -> torch.Tensor:
    return torch.frexp(z.to(torch.float32)).exponent.to(torch.int32)


class PackedDelta(PackedReference):
    """State: a shadow, the words as last gathered."""

    name = "delta"

    def __init__(self, dtype, block_size, device):
        super().__init__(dtype, block_size, device)
        self.shape = packed_shape(self.fmt)

    def state_bytes(self, num_values):
        return num_values * self.fmt.itemsize

    def new_state(self, words):
        return words.clone()

    def update_state(self, words, state):
        state.copy_(words)

    def halves(self, words: torch.Tensor) -> torch.Tensor:
        """The 16-bit words that are coded, as int32 in [0, 65535]."""
        return (words >> 16) & 0xFFFF if self.shape.halves else words.to(torch.int32) & 0xFFFF

    def exponent(self, half: torch.Tensor) -> torch.Tensor:
        return (half >> self.shape.exponent_shift) & self.shape.exponent_mask

    def widths(self, exponent: torch.Tensor, c1, c2) -> tuple[torch.Tensor, torch.Tensor]:
        return (c1 - exponent).clamp(0, self.shape.max_a), (c2 - exponent).clamp(0, self.shape.max_b)

    def choose_centres(self, new: torch.Tensor, old: torch.Tensor) -> tuple[int, int]:
        """(c1, c2) of one region of 16-bit words: the cheapest candidate on its sample, the first one of
        equals."""
        positions = torch.from_numpy(sample_positions(new.numel()))
        z, exponent = zigzag(new[positions], old[positions]), self.exponent(old[positions])
        scale = exponent + bit_length(z)
        changed = z > 0
        count = int(changed.sum())
        mean = (int(scale[changed].sum()) + count // 2) // count if count else int(exponent.max())
        mean = min(max(mean, 1), 248)
        best = None
        for gap in range(NUM_GAPS):
            for step in range(NUM_SCALES):
                c2 = mean - 1 + step
                c1 = max(c2 - 1 - gap, 0) if gap < NUM_GAPS - 1 else 0
                a, b = self.widths(exponent, c1, c2)
                near, far = z < (1 << a), z < (1 << a) + (1 << b)
                cost = int(torch.where(near, a, torch.where(far, b, a + ESCAPE_BITS)).sum())
                if best is None or cost < best[0]:
                    best = (cost, c1, c2)
        return best[1], best[2]

    def encode_blocks(self, new, state):
        new_half, old_half = self.halves(new), self.halves(state)
        for first in range(0, new.numel(), HASH_BLOCK):
            part = slice(first, first + HASH_BLOCK)
            if first % (REGION_BLOCKS * HASH_BLOCK) == 0:
                whole = slice(first, first + REGION_BLOCKS * HASH_BLOCK)
                c1, c2 = self.choose_centres(new_half[whole], old_half[whole])
            coded, num_escapes = self.encode_block(
                new[part], state[part], new_half[part], old_half[part], c1, c2
            )
            yield coded, num_escapes | c1 << 16 | c2 << 24

    def encode_block(self, new, old, new_half, old_half, c1: int, c2: int) -> tuple[np.ndarray, int]:
        """Bytes of one block, a multiple of 4, and its number of escapes or its mode."""
        count = new.numel()
        if torch.equal(new, old):
            return np.empty(0, np.uint8), NUM_ESCAPES_SAME
        z = zigzag(new_half, old_half)
        a, b = self.widths(self.exponent(old_half), c1, c2)
        near = z < (1 << a)
        far = ~near & (z < (1 << a) + (1 << b))
        escaped = ~near & ~far
        code = torch.where(near, z, torch.where(far, z - (1 << a), 0))
        codes = pack_bits(code, torch.where(far, b, a))
        bitmap = np.zeros(bitmap_bytes(count), np.uint8)
        flags = np.packbits(far.numpy(), bitorder="little")
        bitmap[: flags.size] = flags
        positions = torch.nonzero(escaped).view(-1)
        escapes = (positions | new_half[positions].to(torch.int64) << 16).numpy().astype("<u4").view(np.uint8)
        low = lower_halves(new) if self.shape.halves else np.empty(0, np.uint8)
        coded = np.concatenate([bitmap, codes, escapes, low])
        return coded, positions.numel()

    def decode_block(self, coded: np.ndarray, descriptor: int, old: torch.Tensor) -> torch.Tensor | None:
        num_escapes, c1, c2 = descriptor & 0xFFFF, descriptor >> 16 & 0xFF, descriptor >> 24
        count = old.numel()
        if num_escapes == NUM_ESCAPES_SAME:
            return old
        if num_escapes > count or coded.size < bitmap_bytes(count):
            return None
        old_half = self.halves(old)
        a, b = self.widths(self.exponent(old_half), c1, c2)
        far = torch.from_numpy(np.unpackbits(coded, count=count, bitorder="little").astype(bool))
        width = torch.where(far, b, a)
        start = bitmap_bytes(count)
        end = start + 4 * -(-int(width.sum()) // 32)
        escape_end = end + 4 * num_escapes
        needed = escape_end + (4 * -(-count // 2) if self.shape.halves else 0)
        if coded.size < needed + TAIL_BYTES:
            return None
        z = unpack_bits(coded[start:end], width) + torch.where(far, 1 << a, 0)
        half = apply_zigzag(z, old_half)
        escapes = torch.from_numpy(coded[end:escape_end].view("<u4").astype(np.int64))
        positions = escapes & 0xFFFF
        if (positions >= count).any():
            return None
        half[positions] = (escapes >> 16).to(torch.int32)
        if not self.shape.halves:
            return half.to(torch.int16)
        low = torch.from_numpy(coded[escape_end : escape_end + 2 * count].view("<u2").astype(np.int32))
        return (half << 16) | low


def lower_halves(words: torch.Tensor) -> np.ndarray:
    low = (words & 0xFFFF).numpy().astype("<u2")
    return np.concatenate([low, np.zeros(low.size % 2, "<u2")]).view(np.uint8)


def pack_bits(code: torch.Tensor, width: torch.Tensor) -> np.ndarray:
    """Codes one after the other, lowest bit first, in whole little-endian 32-bit words."""
    start = torch.cumsum(width, 0) - width
    total = int(width.sum())
    bits = np.zeros(32 * -(-total // 32), np.uint8)
    for bit in range(int(width.max())):
        wide = width > bit
        bits[(start[wide] + bit).numpy()] = (code[wide] >> bit & 1).to(torch.uint8).numpy()
    return np.packbits(bits, bitorder="little")


def unpack_bits(coded: np.ndarray, width: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_bits`: int32 codes."""
    bits = torch.from_numpy(np.unpackbits(coded, bitorder="little"))
    start = torch.cumsum(width, 0) - width
    code = torch.zeros_like(width)
    for bit in range(int(width.max())):
        wide = width > bit
        code[wide] |= bits[start[wide] + bit].to(torch.int32) << bit
    return code
