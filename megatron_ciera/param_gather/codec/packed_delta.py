"""`delta` with the `packed` coder in plain torch: the twin of kernels/delta_packed_*.py, and its CPU path."""

import numpy as np
import torch

from .packed_format import (
    DENSE_STEP,
    LANES,
    NUM_ESCAPES_RAW,
    NUM_ESCAPES_SAME,
    POSITION_BITS,
    SAMPLED,
    SPARSE_STEP,
    TAIL_BYTES,
    VALUES,
    packed_shape,
)
from .packed_reference import PackedReference
from .words import HASH_BLOCK

_LENGTH_BYTES = LANES
_FLAG_BYTES = LANES * VALUES // 8


def zigzag(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, 3, 4 … for new - old = 0, -1, 1, -2, 2 … modulo 2^16 (int32 of 16-bit words)."""
    difference = ((new - old) << 16) >> 16
    return (difference << 1) ^ (difference >> 31)


def apply_zigzag(z: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`zigzag`: the new 16-bit word, as int32 in [0, 65535]."""
    return (old + ((z >> 1) ^ -(z & 1))) & 0xFFFF


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

    @property
    def quad(self) -> int:
        """Values of a lane that lie together: 16 bytes."""
        return 4 if self.shape.halves else 8

    def lanes(self, words: torch.Tensor) -> torch.Tensor:
        """Words of a whole block as int32 [LANES, VALUES], each lane's in its order."""
        quads = words.to(torch.int32).view(-1, LANES, self.quad)
        return quads.permute(1, 0, 2).reshape(LANES, VALUES)

    def block(self, lanes: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`lanes`: words of a block from int32 [LANES, VALUES]."""
        words = lanes.view(LANES, -1, self.quad).permute(1, 0, 2).reshape(-1)
        return words if self.shape.halves else words.to(torch.int16)

    def halves(self, lanes: torch.Tensor) -> torch.Tensor:
        """The 16-bit words that are coded, as int32 in [0, 65535]."""
        return (lanes >> 16 if self.shape.halves else lanes) & 0xFFFF

    def exponent(self, half: torch.Tensor) -> torch.Tensor:
        return (half >> self.shape.exponent_shift) & self.shape.exponent_mask

    def widths(self, old_half: torch.Tensor, centre: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Bits of near and of far values."""
        far = (centre - self.exponent(old_half)).clamp(0, self.shape.max_width)
        return (far - step).clamp(min=0), far

    def choose_widths(self, z: torch.Tensor, old_half: torch.Tensor) -> tuple[int, int]:
        """(centre, step) of a block: the mean of exponent + bits of z over the changed values of a sample, plus
        1.65, and a small step where at least half of them changed."""
        z, exponent = z[:, SAMPLED], self.exponent(old_half[:, SAMPLED])
        changed = z > 0
        count, total = int(changed.sum()), int((exponent + bit_length(z))[changed].sum())
        centre = (20 * total + 33 * count) // (20 * max(count, 1))
        return min(centre, 255), DENSE_STEP if 2 * count >= z.numel() else SPARSE_STEP

    def encode_blocks(self, new, state):
        for first in range(0, new.numel(), HASH_BLOCK):
            part = slice(first, first + HASH_BLOCK)
            yield self.encode_block(new[part], state[part])

    def encode_block(self, new: torch.Tensor, old: torch.Tensor) -> tuple[np.ndarray, int]:
        """Bytes of one block, a multiple of 4, and the second word of its descriptor."""
        whole = new.numel() == HASH_BLOCK
        centre = step = 0
        if whole:
            new_lanes = self.lanes(new)
            new_half, old_half = self.halves(new_lanes), self.halves(self.lanes(old))
            z = zigzag(new_half, old_half)
            centre, step = self.choose_widths(z, old_half)
        layout = centre << 16 | step << 24
        if torch.equal(new, old):
            return np.empty(0, np.uint8), NUM_ESCAPES_SAME | layout
        if not whole:
            return whole_words(new), NUM_ESCAPES_RAW
        a, b = self.widths(old_half, centre, step)
        escaped = z >= (1 << a) + (1 << b)
        z = torch.where(escaped, 0, z)
        far = z >= 1 << a
        code, width = torch.where(far, z - (1 << a), z), torch.where(far, b, a)
        streams, lengths = pack_bits(*in_chunks(self.shape.chunk, code, width))
        near = np.packbits(~far.numpy(), axis=1, bitorder="big").reshape(LANES, -1, 4)[:, :, ::-1]
        lane, value = torch.nonzero(backwards(escaped), as_tuple=True)
        value ^= 31
        records = (
            self.position(lane, value) | (new_half - old_half)[lane, value].to(torch.int64) << POSITION_BITS
        )
        parts = [
            lengths,
            np.ascontiguousarray(near.transpose(1, 0, 2)).reshape(-1),
            self.pack_lows(new_lanes),
            (records & 0xFFFFFFFF).numpy().astype("<u4").view(np.uint8),
            streams,
        ]
        return np.concatenate(parts), lane.numel() | layout

    def position(self, lane: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Positions in the block of values of lanes."""
        return value // self.quad * self.quad * LANES + self.quad * lane + value % self.quad

    def pack_lows(self, lanes: torch.Tensor) -> np.ndarray:
        """fp32's lower halves: eight of every lane, then the next eight."""
        if not self.shape.halves:
            return np.empty(0, np.uint8)
        pairs = (lanes & 0xFFFF).view(LANES, VALUES // 8, 8).permute(1, 0, 2)
        return np.ascontiguousarray(pairs.numpy().astype("<u2")).view(np.uint8).reshape(-1)

    def decode_block(self, coded: np.ndarray, descriptor: int, old: torch.Tensor) -> torch.Tensor | None:
        num_escapes, centre, step = descriptor & 0xFFFF, descriptor >> 16 & 0xFF, descriptor >> 24
        if num_escapes == NUM_ESCAPES_SAME:
            return old
        low_bytes = 2 * HASH_BLOCK if self.shape.halves else 0
        records_start = _LENGTH_BYTES + _FLAG_BYTES + low_bytes
        start = records_start + 4 * num_escapes
        if old.numel() < HASH_BLOCK or num_escapes > HASH_BLOCK or coded.size < start:
            return None
        lengths = coded[:_LENGTH_BYTES].astype(np.int64)
        starts = start + np.cumsum(lengths) - lengths
        if (starts + TAIL_BYTES > coded.size).any():
            return None
        near = coded[_LENGTH_BYTES : _LENGTH_BYTES + _FLAG_BYTES].reshape(-1, LANES, 4)[:, :, ::-1]
        near = np.unpackbits(np.ascontiguousarray(near.transpose(1, 0, 2)).reshape(LANES, -1), axis=1)
        near = torch.from_numpy(near.astype(bool))
        old_half = self.halves(self.lanes(old))
        a, b = self.widths(old_half, centre, step)
        width = torch.where(near, a, b)
        chunk = self.shape.chunk
        rows = coded[starts[:, None] + np.arange(TAIL_BYTES)]
        (code,) = in_chunks(chunk, unpack_bits(rows, *in_chunks(chunk, width)))
        half = apply_zigzag(code + torch.where(near, 0, 1 << a), old_half)
        lanes = half
        if self.shape.halves:
            low = coded[_LENGTH_BYTES + _FLAG_BYTES : records_start].view("<u2").astype(np.int32)
            low = torch.from_numpy(low).view(VALUES // 8, LANES, 8).permute(1, 0, 2).reshape(LANES, VALUES)
            lanes = half << 16 | low
        block = self.block(lanes)
        records = torch.from_numpy(coded[records_start:start].view("<i4").astype(np.int64))
        difference = records >> POSITION_BITS << (16 if self.shape.halves else 0)
        block[records & (HASH_BLOCK - 1)] += difference.to(torch.int32).to(block.dtype)
        return block


def whole_words(words: torch.Tensor) -> np.ndarray:
    """The words' bytes, padded with zeros to a multiple of 4."""
    data = words.numpy().view(np.uint8)
    return np.concatenate([data, np.zeros(-data.size % 4, np.uint8)])


def in_chunks(chunk: int, *values: torch.Tensor) -> list[torch.Tensor]:
    """[LANES, VALUES] with the order inside every chunk of values turned round: its own inverse."""
    return [x.view(LANES, -1, chunk).flip(2).reshape(LANES, VALUES) for x in values]


def backwards(flags: torch.Tensor) -> torch.Tensor:
    """[LANES, VALUES] with every 32 values of a lane turned round, the order in which kernels list them."""
    return flags.view(LANES, -1, 32).flip(2).reshape(LANES, VALUES)


def pack_bits(code: torch.Tensor, width: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes of every lane one after the other, lowest bit first, in whole bytes: (bytes of all lanes, padded to
    a multiple of 4; bytes of each lane as uint8 [LANES])."""
    start = torch.cumsum(width, 1) - width
    lengths = ((width.sum(1) + 7) // 8).numpy()
    bits = torch.zeros(LANES, 8 * int(lengths.max()), dtype=torch.uint8)
    for bit in range(int(width.max())):
        lane, value = torch.nonzero(width > bit, as_tuple=True)
        bits[lane, start[lane, value] + bit] = (code[lane, value] >> bit & 1).to(torch.uint8)
    packed = np.packbits(bits.numpy(), axis=1, bitorder="little")
    streams = packed[np.arange(packed.shape[1]) < lengths[:, None]]
    return np.concatenate([streams, np.zeros(-streams.size % 4, np.uint8)]), lengths.astype(np.uint8)


def unpack_bits(coded: np.ndarray, width: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack_bits` for lanes that start in rows of ``coded``, uint8 [LANES, TAIL_BYTES]."""
    bits = torch.from_numpy(np.unpackbits(coded, axis=1, bitorder="little"))
    start = torch.cumsum(width, 1) - width
    code = torch.zeros_like(width)
    for bit in range(int(width.max())):
        lane, value = torch.nonzero(width > bit, as_tuple=True)
        code[lane, value] |= bits[lane, start[lane, value] + bit].to(torch.int32) << bit
    return code
