"""`exponent-reuse` with the `ans` coder: exponents of changed blocks as bytes for nvCOMP, and merge, check
and store. Format: docs/codec.md. Table: ans_chunks.py.
"""

import triton
import triton.language as tl

from .ans_chunks import COLUMNS, available_symbols, chunk_table, fixed_start
from .bits import HASH_BLOCK, wrapping_sum
from .delta_packed_decode import header_is_right, report_damage
from .exponents_packed import exponent_hash, load_rest, rows_of_blocks, store_rest
from .lanes import typed_pointer


@triton.jit
def encode_changed(
    table,
    block_segment,
    block_index,
    symbols,
    chunk_bytes,
    multipliers,
    WORD32: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    BITMAP_WORDS: tl.constexpr,
    FIXED_BYTES: tl.constexpr,
    FULL: tl.constexpr,
):
    """One program a hash block: bitmap, sign and mantissa, and its changed exponents behind those that its
    chunk has so far (``chunk_bytes`` grows)."""
    ROWS: tl.constexpr = HASH_BLOCK // 8
    NUM: tl.constexpr = HASH_BLOCK // BLOCK
    pid = tl.program_id(0)
    entry = table + tl.load(block_segment + pid) * COLUMNS
    block = tl.load(block_index + pid)
    words = typed_pointer(tl.load(entry), WORD32, True)
    address = tl.load(entry + 1)
    payload = address.to(tl.pointer_type(tl.uint32))
    state = tl.load(entry + 2).to(tl.pointer_type(tl.int64))
    count = tl.load(entry + 3)
    values_per_chunk = tl.load(entry + 6)
    start = block.to(tl.int64) * HASH_BLOCK
    length = tl.minimum(count - start, HASH_BLOCK).to(tl.int32)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, 8)[None, :]
    position = row[:, None] * 8 + column
    if FULL:
        word = tl.load(words + start + position).to(tl.int32)
    else:
        word = tl.load(words + start + position, mask=position < length, other=0).to(tl.int32)
    exponent = (word >> SHIFT) & MASK
    index = tl.arange(0, NUM)
    there = index * BLOCK < length
    pair = state + 2 * (start // BLOCK + index)
    differs = (
        exponent_hash(exponent, 0x243F6A8885A308D3, ROWS, BLOCK) != tl.load(pair, mask=there, other=0)
    ) | (exponent_hash(exponent, 0x13198A2E03707344, ROWS, BLOCK) != tl.load(pair + 1, mask=there, other=0))
    changed = (differs & there).to(tl.int32)
    rank = tl.cumsum(changed, 0) - changed
    word_bits = word if WORD32 else word & 0xFFFF
    hashed = wrapping_sum(tl.sum(word_bits * tl.load(multipliers + position), 1))
    chunk = tl.load(entry + 5) + start // values_per_chunk
    num_symbols = tl.sum(changed, 0) * BLOCK
    place = tl.atomic_add(chunk_bytes + chunk, num_symbols.to(tl.int64), sem="relaxed")

    hash_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    tl.store(payload + 16 + block, hashed.to(tl.uint32, bitcast=True))
    tl.store(payload + 16 + hash_blocks + block, (place // 16).to(tl.uint32))
    chunks = (count + values_per_chunk - 1) // values_per_chunk
    bitmap = chunk_table(payload, count) + 3 * chunks + block.to(tl.int64) * BITMAP_WORDS
    if NUM >= 32:
        bits = tl.sum(tl.reshape(changed << (index % 32), [NUM // 32, 32]), 1)
        tl.store(bitmap + tl.arange(0, NUM // 32), bits.to(tl.uint32, bitcast=True))
    else:
        tl.store(bitmap, tl.sum(changed << index, 0).to(tl.uint32))
    rest = address + fixed_start(count, values_per_chunk, BITMAP_WORDS) + block.to(tl.int64) * FIXED_BYTES
    byte_words = (length + 3) // 4
    rest_pointer = tl.multiple_of(rest.to(tl.pointer_type(tl.uint32)), 16)
    store_rest(rest_pointer, word, position, length, byte_words, WORD32, SHIFT, ROWS)
    # Symbols of a chunk lie from its first block's on; 16-byte steps, since exponent blocks have 16 and more.
    chunk_start = (tl.load(entry + 4) * HASH_BLOCK + start) - start % values_per_chunk
    symbol_pointer = tl.multiple_of((symbols + chunk_start + place).to(tl.pointer_type(tl.uint8)), 16)
    row_place = rows_of_blocks(rank, ROWS, BLOCK) * BLOCK + row % (BLOCK // 8) * 8
    tl.store(
        symbol_pointer + row_place[:, None] + column,
        exponent.to(tl.uint8),
        mask=rows_of_blocks(changed, ROWS, BLOCK)[:, None] != 0,
    )


@triton.jit
def merge_exponents(
    table,
    block_segment,
    block_index,
    flags,
    symbol_places,
    uncoded_bytes,
    decoded_bytes,
    statuses,
    capacities,
    multipliers,
    identity,
    block_size,
    coder_version,
    WORD32: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    BITMAP_WORDS: tl.constexpr,
    FIXED_BYTES: tl.constexpr,
    FULL: tl.constexpr,
):
    """One program a hash block: new words from sign and mantissa and coded or old exponents; stored only if
    their hash is right."""
    ROWS: tl.constexpr = HASH_BLOCK // 8
    NUM: tl.constexpr = HASH_BLOCK // BLOCK
    pid = tl.program_id(0)
    segment = tl.load(block_segment + pid)
    entry = table + segment * COLUMNS
    block = tl.load(block_index + pid)
    words = typed_pointer(tl.load(entry), WORD32, True)
    address = tl.load(entry + 1)
    payload = address.to(tl.pointer_type(tl.uint32))
    num_bytes = tl.load(entry + 2)
    count = tl.load(entry + 3)
    values_per_chunk = tl.load(entry + 6)
    start = block.to(tl.int64) * HASH_BLOCK
    length = tl.minimum(count - start, HASH_BLOCK).to(tl.int32)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, 8)[None, :]
    position = row[:, None] * 8 + column
    valid = position < length
    words += start
    if FULL:
        old = tl.load(words + position).to(tl.int32)
    else:
        old = tl.load(words + position, mask=valid, other=0).to(tl.int32)

    good = (num_bytes >= tl.load(entry + 7)) & header_is_right(
        payload, num_bytes, count, identity, block_size, coder_version
    )
    hash_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    wanted = tl.load(payload + 16 + block, mask=good, other=0)
    place = tl.load(payload + 16 + hash_blocks + block, mask=good, other=0).to(tl.int64) * 16
    chunks = (count + values_per_chunk - 1) // values_per_chunk
    bitmap = chunk_table(payload, count) + 3 * chunks + block.to(tl.int64) * BITMAP_WORDS
    index = tl.arange(0, NUM)
    bits = tl.load(bitmap + index // 32, mask=good & (index * BLOCK < length), other=0)
    changed = ((bits >> (index % 32).to(tl.uint32)) & 1).to(tl.int32)
    rank = tl.cumsum(changed, 0) - changed
    num_symbols = tl.sum(changed, 0) * BLOCK
    chunk = tl.load(entry + 5) + start // values_per_chunk
    available = available_symbols(uncoded_bytes, decoded_bytes, statuses, capacities, chunk)
    good &= (num_symbols == 0) | (place + num_symbols <= available)

    symbol_pointer = (tl.load(symbol_places + chunk) + place).to(tl.pointer_type(tl.uint8))
    symbol_pointer = tl.multiple_of(symbol_pointer, 16)
    row_changed = rows_of_blocks(changed, ROWS, BLOCK)[:, None] != 0
    row_place = rows_of_blocks(rank, ROWS, BLOCK) * BLOCK + row % (BLOCK // 8) * 8
    coded = tl.load(symbol_pointer + row_place[:, None] + column, mask=good & row_changed, other=0)
    exponent = tl.where(row_changed, coded.to(tl.int32) & MASK, (old >> SHIFT) & MASK)
    rest = address + fixed_start(count, values_per_chunk, BITMAP_WORDS) + block.to(tl.int64) * FIXED_BYTES
    rest_pointer = tl.multiple_of(rest.to(tl.pointer_type(tl.uint32)), 16)
    byte_words = (length + 3) // 4
    new = load_rest(rest_pointer, position, length, byte_words, good, WORD32, SHIFT, ROWS)
    new |= exponent << SHIFT
    if not FULL:
        new = tl.where(valid, new, 0)
    hashed = wrapping_sum(tl.sum(new * tl.load(multipliers + position), 1))
    good &= hashed.to(tl.uint32, bitcast=True) == wanted
    if good:
        stored = new if WORD32 else new.to(tl.int16)
        if FULL:
            tl.store(words + position, stored)
        else:
            tl.store(words + position, stored, mask=valid)
    else:
        report_damage(flags + 2 * segment, block)
