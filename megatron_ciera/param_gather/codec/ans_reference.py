"""The slow clear twin of the `ans` kernels, in numpy: same sizes and same parts, for any coder of bytes.

``compress(bytes) -> bytes`` and ``decompress(bytes) -> bytes | None`` stand where nvCOMP stands on a GPU.
Tests compare it with the kernels; `make_codec` never returns it.
"""

import numpy as np

from .ans_codecs import delta_shape, exponent_shape
from .ans_format import (
    AREA_WORDS,
    CHUNK_ENTRY_WORDS,
    COUNT_SHIFT,
    SPLIT,
    UNCODED,
    checksum,
    chunk_values,
    num_chunks,
    padded,
)
from .container import (
    CODEC_IDS,
    CODER_IDS,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    PayloadError,
    PayloadLayout,
    num_hash_blocks,
    payload_hashes,
    read_header,
)
from .cpu_codec import flag_bad_blocks
from .packed_delta import PackedDelta
from .packed_exponents import PackedExponentReuse
from .words import HASH_BLOCK, block_hashes, exponent_hashes, exponents, ordered_code, words_of_code


class AnsReference:
    """What both twins share: chunks of symbols, areas behind them, tables in front."""

    coder_name = "ans"

    def attach(self, compress, decompress, coder_version: int) -> None:
        self.compress, self.decompress = compress, decompress
        self.layout = PayloadLayout(self.name, "nvcomp", self.fmt, self.block_size, coder_version)

    def bound(self, num_values):
        return self.ans_shape.bound(num_values)

    def _encode_one(self, new, state, out: np.ndarray) -> int:
        words = new.numpy().view(self.fmt.numpy_dtype)
        count, shape = words.size, self.ans_shape
        per_chunk = chunk_values(count) // HASH_BLOCK
        fixed, end = shape.fixed_start(count), shape.body_start(count)
        out[:end] = 0
        blocks = list(self.encode_hash_blocks(words, state))
        chunk_table = np.zeros((num_chunks(count), CHUNK_ENTRY_WORDS), "<u4")
        block_table = np.zeros(len(blocks), "<u4")
        bitmaps = np.zeros((len(blocks), shape.bitmap_words), "<u4")
        for chunk in range(len(chunk_table)):
            symbols, area = b"", b""
            for block in range(chunk * per_chunk, min((chunk + 1) * per_chunk, len(blocks))):
                coded, fixed_part, behind, entry, bitmaps[block] = blocks[block]
                block_table[block] = entry | (len(area) // 4 if shape.escapes else len(symbols) // 16)
                place = fixed + block * shape.fixed_bytes
                out[place : place + fixed_part.size] = fixed_part
                symbols += coded.tobytes()
                area += behind.tobytes()
            symbols = symbols or bytes(16)
            body = self.compress(symbols)
            uncoded = len(body) >= len(symbols)
            body = symbols if uncoded else body
            sum_of_body = checksum(np.frombuffer(body, np.uint8))
            chunk_table[chunk] = end // 16, len(body) | (UNCODED if uncoded else 0), sum_of_body
            for part in (body, area):
                part += bytes(padded(len(part)) - len(part))
                out[end : end + len(part)] = np.frombuffer(part, np.uint8)
                end += len(part)
        header = np.zeros(1, HEADER)
        header["magic"], header["version"], header["codec"], header["coder"] = self.identity_fields
        header["dtype"], header["block_size"] = self.fmt.dtype_id, self.block_size
        header["num_values"], header["total_bytes"] = count, end
        header["hash_block"], header["coder_version"] = HASH_BLOCK, self.layout.coder_version
        hashes = block_hashes(words).astype("<u4")
        parts = (header, hashes, block_table, chunk_table, bitmaps)
        front = np.concatenate([part.reshape(-1).view(np.uint8) for part in parts])
        out[: front.size] = front
        return end

    @property
    def identity_fields(self):
        return MAGIC, VERSION, CODEC_IDS[self.layout.codec], CODER_IDS[self.layout.coder]

    def _decode_one(self, payload: np.ndarray, target, flag) -> None:
        words = target.numpy().view(self.fmt.numpy_dtype)
        count, blocks = words.size, num_hash_blocks(words.size)
        try:
            read_header(payload, self.layout, count)
            if payload.size < self.ans_shape.body_start(count):
                raise PayloadError("payload is shorter than its tables")
        except PayloadError:
            flag_bad_blocks(flag, np.arange(blocks))
            return
        start = HEADER_BYTES + 4 * blocks
        block_table = payload[start : start + 4 * blocks].view("<u4")
        entry_bytes = 4 * CHUNK_ENTRY_WORDS
        chunk_table = payload[start + 4 * blocks :][: entry_bytes * num_chunks(count)].view("<u4")
        chunk_table = chunk_table.reshape(-1, CHUNK_ENTRY_WORDS)
        bitmap_start = start + 4 * blocks + chunk_table.nbytes
        bitmaps = payload[bitmap_start:][: 4 * self.ans_shape.bitmap_words * blocks].view("<u4")
        bitmaps = bitmaps.reshape(blocks, self.ans_shape.bitmap_words)
        wanted, bad = payload_hashes(payload, count), []
        chunks = [
            self._decode_chunk(payload, int(at) * 16, int(size), int(wanted))
            for at, size, wanted in chunk_table
        ]
        for block in range(blocks):
            part = words[block * HASH_BLOCK : (block + 1) * HASH_BLOCK]
            chunk, inside = divmod(block * HASH_BLOCK, chunk_values(count))
            place = self.ans_shape.fixed_start(count) + block * self.ans_shape.fixed_bytes
            symbols, area = chunks[chunk]
            fixed_part = payload[place : place + self.ans_shape.fixed_bytes]
            new = self.decode_hash_block(
                part, symbols, inside, area, fixed_part, int(block_table[block]), bitmaps[block]
            )
            if new is None or block_hashes(new)[0] != wanted[block]:
                bad.append(block)
            else:
                part[:] = new
        flag_bad_blocks(flag, np.array(bad, np.int64))

    def _decode_chunk(
        self, payload: np.ndarray, place: int, entry: int, wanted: int
    ) -> tuple[np.ndarray, np.ndarray]:
        size = entry & ~UNCODED
        coded = payload[place : place + size]
        nothing = np.empty(0, np.uint8)
        if coded.size < size or size == 0 or checksum(coded) != wanted:
            return nothing, nothing
        symbols = coded if entry & UNCODED else self.decompress(coded.tobytes())
        symbols = nothing if symbols is None else np.frombuffer(symbols, np.uint8)
        return symbols, payload[place + padded(size) :]


class AnsDeltaReference(AnsReference, PackedDelta):
    def __init__(self, dtype, block_size, device, compress, decompress, coder_version):
        PackedDelta.__init__(self, dtype, block_size, device)
        self.ans_shape = delta_shape(self.fmt)
        self.attach(compress, decompress, coder_version)

    def _halves(self, words: np.ndarray) -> np.ndarray:
        return words if words.itemsize == 2 else (words >> np.uint32(16)).astype(np.uint16)

    def encode_hash_blocks(self, words, state):
        shadow = state.numpy().view(self.fmt.numpy_dtype)
        for first in range(0, words.size, HASH_BLOCK):
            new = words[first : first + HASH_BLOCK]
            half, old = self._halves(new), self._halves(shadow[first : first + HASH_BLOCK])
            difference = ordered_code(half).astype(np.int32) - ordered_code(old)
            escaped = np.flatnonzero(np.abs(difference) > 127)
            low = np.empty(0, np.uint16) if new.itemsize == 2 else new.astype(np.uint16)
            if 4 * escaped.size > new.size:
                symbols, area = half.astype(np.uint8), (half >> 8).astype(np.uint8)
                area = np.concatenate([area, np.zeros(-area.size % 4, np.uint8)])
                entry = SPLIT << COUNT_SHIFT
            else:
                symbols = difference.astype(np.int8)
                symbols[escaped] = -128
                area = (escaped | half[escaped].astype(np.int64) << 16).astype("<u4")
                entry = escaped.size << COUNT_SHIFT
            yield symbols, low.view(np.uint8), area, entry, 0

    def decode_hash_block(self, old, symbols, inside, area, fixed_part, entry, bitmap):
        escapes, first = entry >> COUNT_SHIFT, 4 * (entry & ((1 << COUNT_SHIFT) - 1))
        symbols = symbols[inside : inside + old.size]
        words = -(-old.size // 4) if escapes == SPLIT else escapes
        area = area[first : first + 4 * words]
        if symbols.size < old.size or words > AREA_WORDS or area.size < 4 * words:
            return None
        if escapes == SPLIT:
            half = symbols.astype(np.uint16) | area[: old.size].astype(np.uint16) << 8
        else:
            half = words_of_code(ordered_code(self._halves(old)) + symbols.view(np.int8))
            records = area.copy().view("<u4")
            if (records & 0xFFFF >= old.size).any():
                return None
            half[records & 0xFFFF] = records >> 16
        if old.itemsize == 2:
            return half
        return half.astype(np.uint32) << 16 | fixed_part[: 2 * old.size].copy().view("<u2")


class AnsExponentReuseReference(AnsReference, PackedExponentReuse):
    def __init__(self, dtype, block_size, device, compress, decompress, coder_version):
        PackedExponentReuse.__init__(self, dtype, block_size, device)
        self.ans_shape = exponent_shape(self.fmt, block_size)
        self.attach(compress, decompress, coder_version)

    def encode_hash_blocks(self, words, state):
        exponent = exponents(words, self.fmt)
        changed = (exponent_hashes(exponent, self.block_size) != state.numpy().view(np.uint64)).any(axis=1)
        in_hash_block = HASH_BLOCK // self.block_size
        for first in range(0, words.size, HASH_BLOCK):
            here = changed[first // self.block_size :][:in_hash_block]
            blocks = np.zeros(here.size * self.block_size, np.uint8)
            blocks[: words.size - first] = exponent[first : first + HASH_BLOCK]
            symbols = blocks.reshape(-1, self.block_size)[here].reshape(-1)
            rest = self._rest_parts(words[first : first + HASH_BLOCK])
            bits = np.zeros(self.ans_shape.bitmap_words * 32, bool)
            bits[: here.size] = here
            bitmap = np.packbits(bits, bitorder="little").view("<u4")
            whole = [np.pad(part.view(np.uint8), (0, -part.nbytes % 4)) for part in rest]
            yield symbols, np.concatenate(whole), np.empty(0, np.uint8), 0, bitmap

    def decode_hash_block(self, old, symbols, inside, area, fixed_part, entry, bitmap):
        num_blocks = self.num_blocks(old.size)
        changed = np.unpackbits(bitmap.copy().view(np.uint8), count=num_blocks, bitorder="little").astype(
            bool
        )
        wanted = int(changed.sum()) * self.block_size
        symbols = symbols[16 * entry : 16 * entry + wanted]
        if symbols.size < wanted:
            return None
        exponent = np.zeros((num_blocks, self.block_size), np.uint8)
        exponent.reshape(-1)[: old.size] = exponents(old, self.fmt)
        exponent[changed] = symbols.reshape(-1, self.block_size) & ((1 << self.fmt.exponent_bits) - 1)
        exponent = exponent.reshape(-1)[: old.size]
        position = 0

        def take(num_bytes: int) -> np.ndarray:
            nonlocal position
            start, position = position, position + padded_words(num_bytes)
            return fixed_part[start : start + num_bytes]

        rest = self._take_rest(take, old.size)
        return rest | exponent.astype(rest.dtype) << rest.dtype.type(self.fmt.exponent_shift)


def padded_words(num_bytes: int) -> int:
    return -(-num_bytes // 4) * 4
