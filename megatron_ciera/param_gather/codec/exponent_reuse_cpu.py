"""`exponent-reuse` on CPU: the CIERA paper's Algorithm 1. Body bytes: docs/codec.md.

Sender: split each word into exponent and sign+mantissa; a block whose 128-bit exponent hash equals the stored
one keeps its exponents on the receiver. Payload = bitmap of changed blocks, sign+mantissa of all values,
entropy-coded exponents of the changed blocks. The receiver's old exponents are those of the words it already
holds.
"""

import numpy as np
import torch

from .cpu_codec import CpuCodec
from .streams import BodyReader, StreamError, read_bytes, write_bytes
from .words import HASH_BLOCK, WordFormat, exponent_hashes, exponents


def pack_rest(words: np.ndarray, fmt: WordFormat) -> np.ndarray:
    """Sign and mantissa of every word, densely packed: 1 byte (bf16), 11 bits (fp16) or 3 bytes (fp32) a
    value.

    fp16: the low bytes of all values, then their 3 high bits as three bit planes (little bit order, padded to
    bytes).
    """
    sign_shift = words.dtype.type(fmt.exponent_bits)
    mantissa = words & words.dtype.type((1 << fmt.exponent_shift) - 1)
    rest = ((words >> sign_shift) & words.dtype.type(1 << fmt.exponent_shift)) | mantissa
    if fmt.exponent_shift == 7:
        return rest.astype(np.uint8)
    if fmt.exponent_shift == 10:
        planes = [
            np.packbits((rest >> np.uint16(bit)).astype(np.uint8) & 1, bitorder="little")
            for bit in (8, 9, 10)
        ]
        return np.concatenate([rest.astype(np.uint8), *planes])
    return np.ascontiguousarray(rest.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :3]).reshape(-1)


def unpack_rest(packed: np.ndarray, count: int, fmt: WordFormat) -> np.ndarray:
    """Inverse of :func:`pack_rest`: words with a zero exponent field."""
    if fmt.exponent_shift == 7:
        rest = packed.astype(np.uint16)
    elif fmt.exponent_shift == 10:
        rest = packed[:count].astype(np.uint16)
        for plane, bit in zip(packed[count:].reshape(3, -1), (8, 9, 10), strict=True):
            rest |= np.unpackbits(plane, count=count, bitorder="little").astype(np.uint16) << np.uint16(bit)
    else:
        wide = np.zeros((count, 4), np.uint8)
        wide[:, :3] = packed.reshape(count, 3)
        rest = wide.reshape(-1).view("<u4")
    sign = (rest >> rest.dtype.type(fmt.exponent_shift)) << rest.dtype.type(fmt.bits - 1)
    return sign | (rest & rest.dtype.type((1 << fmt.exponent_shift) - 1))


def rest_bytes(count: int, fmt: WordFormat) -> int:
    """Bytes of :func:`pack_rest` for ``count`` values."""
    return count * (fmt.rest_bits // 8) + (3 * -(-count // 8) if fmt.rest_bits % 8 else 0)


class ExponentReuseCpu(CpuCodec):
    """State: int64 [num_blocks, 2], the bits of the 128-bit exponent hash of each block. `ans` coder."""

    name, coder_name = "exponent-reuse", "ans"

    def num_blocks(self, num_values: int) -> int:
        return -(-num_values // self.block_size)

    @property
    def group_values(self) -> int:
        """Values coded together: whole exponent blocks and whole hash blocks, about ``chunk_values``."""
        unit = int(np.lcm(self.block_size, HASH_BLOCK))
        return unit * max(1, self.chunk_values // unit)

    def state_bytes(self, num_values):
        return 16 * self.num_blocks(num_values)

    def new_state(self, words):
        state = torch.empty(self.num_blocks(words.numel()), 2, dtype=torch.int64)
        self.update_state(words, state)
        return state

    def update_state(self, words, state):
        exponent = exponents(words.numpy().view(self.fmt.numpy_dtype), self.fmt)
        state.copy_(torch.from_numpy(exponent_hashes(exponent, self.block_size).view(np.int64)))

    def encode_body(self, words, state):
        exponent = exponents(words, self.fmt)
        changed = (exponent_hashes(exponent, self.block_size) != state.view(np.uint64)).any(axis=1)
        parts = [np.packbits(changed, bitorder="little"), pack_rest(words, self.fmt)]
        moved = np.repeat(changed, self.block_size)[: words.size]
        for first in range(0, words.size, self.group_values):
            last = first + self.group_values
            coded = write_bytes(exponent[first:last][moved[first:last]])
            parts.append(np.frombuffer(coded, np.uint8))
        return np.concatenate(parts), ()

    def decode_body(self, body, extra, base):
        reader = BodyReader(body)
        try:
            bitmap = reader.take(-(-self.num_blocks(base.size) // 8))
            rest = unpack_rest(reader.take(rest_bytes(base.size, self.fmt)), base.size, self.fmt)
        except StreamError:
            return
        changed = np.unpackbits(bitmap, count=self.num_blocks(base.size), bitorder="little").astype(bool)
        moved = np.repeat(changed, self.block_size)[: base.size]
        shift = base.dtype.type(self.fmt.exponent_shift)
        for first in range(0, base.size, self.group_values):
            part = slice(first, first + self.group_values)
            exponent = exponents(base[part], self.fmt)
            try:
                exponent[moved[part]] = read_bytes(reader, int(np.count_nonzero(moved[part])))
            except StreamError:
                continue
            yield first, rest[part] | (exponent.astype(base.dtype) << shift)
