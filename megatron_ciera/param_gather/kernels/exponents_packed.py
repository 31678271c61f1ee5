"""`exponent-reuse` with the `packed` coder: hashes, encode, decode-and-apply. Format: docs/codec.md.

Rows of 8 values are 8 exponent bytes, one 64-bit lane of the SplitMix64 hash, and 8 nibbles, one 32-bit word.
Tables as for deltas, with states (int64 [blocks, 2]) in place of old words when encoding.
"""

import triton
import triton.language as tl

from .bits import HASH_BLOCK, wrapping_sum
from .delta_packed_decode import DECODE_COLUMNS, header_is_right, report_damage
from .delta_packed_encode import ENCODE_COLUMNS, place_block, write_header
from .lanes import RAW_MODE, typed_pointer

TOP_ABOVE_MEAN, ESCAPE_NIBBLE = tl.constexpr(4), tl.constexpr(15)


@triton.jit
def splitmix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def exponent_hash(exponent, seed, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One SplitMix64 stream of every exponent block in [ROWS, 8] exponents (int32): int64 [ROWS * 8 /
    BLOCK]."""
    BLOCK_ROWS: tl.constexpr = BLOCK // 8
    column = tl.arange(0, 8)[None, :]
    lanes = tl.sum(exponent.to(tl.uint64) << (8 * column).to(tl.uint64), 1)
    place = (tl.arange(0, ROWS) % BLOCK_ROWS + 1).to(tl.uint64)
    mixed = splitmix64((lanes ^ seed) + place * 0x9E3779B97F4A7C15)
    return tl.sum(tl.reshape(mixed.to(tl.int64, bitcast=True), [ROWS // BLOCK_ROWS, BLOCK_ROWS]), 1)


@triton.jit
def rows_of_blocks(values, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A value of each exponent block, repeated for each of its rows."""
    NUM: tl.constexpr = ROWS * 8 // BLOCK
    return tl.reshape(tl.broadcast_to(values[:, None], [NUM, BLOCK // 8]), [ROWS])


@triton.jit
def start_payloads(table, sizes, identity, block_size):
    """One program a segment: the header; of a segment without values the whole payload."""
    segment = tl.program_id(0)
    entry = table + segment * ENCODE_COLUMNS
    out = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
    count = tl.load(entry + 3)
    write_header(out, count, identity, block_size)
    if count == 0:
        place_block(entry, sizes + segment, out, count, segment, 0, 0, 0)


@triton.jit
def hash_exponents(
    words, state, count, WORD32: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a hash block: the hashes of its exponent blocks into ``state``."""
    ROWS: tl.constexpr = HASH_BLOCK // 8
    start = tl.program_id(0).to(tl.int64) * HASH_BLOCK
    position = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    word = tl.load(words + start + position, mask=start + position < count, other=0).to(tl.int32)
    exponent = (word >> SHIFT) & MASK
    index = start // BLOCK + tl.arange(0, ROWS * 8 // BLOCK)
    there = index * BLOCK < count
    tl.store(state + 2 * index, exponent_hash(exponent, 0x243F6A8885A308D3, ROWS, BLOCK), mask=there)
    tl.store(state + 2 * index + 1, exponent_hash(exponent, 0x13198A2E03707344, ROWS, BLOCK), mask=there)


@triton.jit
def encode_exponents(
    table,
    block_segment,
    block_index,
    sizes,
    multipliers,
    WORD32: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program a hash block; FULL promises that it is whole."""
    ROWS: tl.constexpr = HASH_BLOCK // 8
    NUM: tl.constexpr = HASH_BLOCK // BLOCK
    pid = tl.program_id(0)
    segment = tl.load(block_segment + pid)
    block = tl.load(block_index + pid)
    entry = table + segment * ENCODE_COLUMNS
    words = typed_pointer(tl.load(entry), WORD32, ALIGNED)
    state = tl.load(entry + 1).to(tl.pointer_type(tl.int64))
    out = tl.load(entry + 2)
    count = tl.load(entry + 3)
    start = block.to(tl.int64) * HASH_BLOCK
    length = tl.minimum(count - start, HASH_BLOCK).to(tl.int32)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, 8)[None, :]
    position = row[:, None] * 8 + column
    valid = position < length
    if FULL:
        word = tl.load(words + start + position).to(tl.int32)
    else:
        word = tl.load(words + start + position, mask=valid, other=0).to(tl.int32)

    # Step 1: which exponent blocks changed.
    exponent = (word >> SHIFT) & MASK
    index = tl.arange(0, NUM)
    there = index * BLOCK < length
    first = start // BLOCK
    old_first = tl.load(state + 2 * (first + index), mask=there, other=0)
    old_second = tl.load(state + 2 * (first + index) + 1, mask=there, other=0)
    differs = (exponent_hash(exponent, 0x243F6A8885A308D3, ROWS, BLOCK) != old_first) | (
        exponent_hash(exponent, 0x13198A2E03707344, ROWS, BLOCK) != old_second
    )
    changed = (differs & there).to(tl.int32)
    rank = tl.cumsum(changed, 0) - changed
    num_changed = tl.sum(changed, 0)
    row_changed = rows_of_blocks(changed, ROWS, BLOCK)
    row_place = rows_of_blocks(rank, ROWS, BLOCK) * (BLOCK // 8) + row % (BLOCK // 8)

    # Step 2: nibbles, escapes, sizes.
    total_exponent = tl.sum(tl.sum(exponent, 1), 0)
    top = tl.minimum(total_exponent // length + TOP_ABOVE_MEAN, MASK)
    below = (top - exponent) & MASK
    escaped = ((below >= ESCAPE_NIBBLE) & (row_changed[:, None] != 0)).to(tl.int32)
    if not FULL:
        escaped = tl.where(valid, escaped, 0)
        below = tl.where(valid, below, 0)
    nibbles = tl.sum(tl.minimum(below, ESCAPE_NIBBLE) << (4 * column), 1)
    row_escapes = tl.sum(escaped, 1)
    before = tl.cumsum(row_escapes, 0) - row_escapes
    num_escapes = tl.sum(row_escapes, 0)
    word_bits = word if WORD32 else word & 0xFFFF
    hashed = wrapping_sum(tl.sum(word_bits * tl.load(multipliers + position), 1))
    bitmap_words = ((length + BLOCK - 1) // BLOCK + 31) // 32
    byte_words = (length + 3) // 4
    rest_words = byte_words
    raw_bytes = length * 2
    if WORD32:
        rest_words += (length + 1) // 2
        raw_bytes = length * 4
    if SHIFT == 10:
        rest_words += 3 * ((length + 31) // 32)
    nibble_words = num_changed * (BLOCK // 8)
    coded_words = bitmap_words + rest_words + nibble_words + num_escapes
    is_raw = coded_words * 4 >= raw_bytes
    num_words = tl.where(is_raw, (raw_bytes + 3) // 4, coded_words)
    mode = tl.where(is_raw, RAW_MODE, num_escapes)

    # Step 3: hash, descriptor, block.
    layout = mode | (top << 16)
    words_out = out.to(tl.pointer_type(tl.int32))
    offset = place_block(entry, sizes + segment, words_out, count, block, num_words, hashed, layout)
    body = out.to(tl.pointer_type(tl.uint32)) + offset
    if is_raw:
        raw_body = (out + offset * 4).to(tl.pointer_type(tl.int32 if WORD32 else tl.int16))
        padded = length if WORD32 else length + (length & 1)
        tl.store(raw_body + position, word if WORD32 else word.to(tl.int16), mask=position < padded)
    else:
        bitmap = body.to(tl.pointer_type(tl.uint8), bitcast=True)
        bits = tl.sum(tl.reshape(changed << (index % 8), [(NUM + 7) // 8, 8 if NUM >= 8 else NUM]), 1)
        bitmap_place = tl.arange(0, (NUM + 7) // 8)
        tl.store(bitmap + bitmap_place, bits.to(tl.uint8), mask=bitmap_place < 4 * bitmap_words)
        if NUM < 32:
            pad = tl.arange(0, 4)
            tl.store(bitmap + pad, 0, mask=pad >= (NUM + 7) // 8)
        store_rest(body + bitmap_words, word, position, length, byte_words, WORD32, SHIFT, ROWS)
        tl.store(
            body + bitmap_words + rest_words + row_place,
            nibbles.to(tl.uint32, bitcast=True),
            mask=row_changed != 0,
        )
        if num_escapes > 0:
            escapes = body + bitmap_words + rest_words + nibble_words
            place = before[:, None] + tl.cumsum(escaped, 1) - 1
            tl.store(
                escapes + place, (position | (exponent << 16)).to(tl.uint32, bitcast=True), mask=escaped != 0
            )


@triton.jit
def store_rest(
    base, word, position, length, byte_words, WORD32: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr
):
    """Sign and mantissa: bytes, then (fp16) three bit planes or (fp32) lower halves, each in whole words."""
    mantissa = word & ((1 << SHIFT) - 1)
    if WORD32:
        sign = (word >> 31) & 1
    else:
        sign = (word >> 15) & 1
    rest = mantissa | (sign << SHIFT)
    as_bytes = base.to(tl.pointer_type(tl.uint8), bitcast=True)
    padded = position < 4 * byte_words
    if WORD32:
        tl.store(as_bytes + position, (rest >> 16).to(tl.uint8), mask=padded)
        halves = (base + byte_words).to(tl.pointer_type(tl.uint16), bitcast=True)
        tl.store(halves + position, rest.to(tl.uint16), mask=position < length + (length & 1))
    else:
        tl.store(as_bytes + position, rest.to(tl.uint8), mask=padded)
    if SHIFT == 10:
        row = tl.arange(0, ROWS)
        plane_words = (length + 31) // 32
        for plane in tl.static_range(3):
            bits = tl.sum(((rest >> (8 + plane)) & 1) << tl.arange(0, 8)[None, :], 1)
            plane_bytes = (base + byte_words + plane * plane_words).to(
                tl.pointer_type(tl.uint8), bitcast=True
            )
            tl.store(plane_bytes + row, bits.to(tl.uint8), mask=row < 4 * plane_words)


@triton.jit
def load_rest(
    base, position, length, byte_words, there, WORD32: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr
):
    """Inverse of store_rest: words with a zero exponent field, as int32. Nothing is read unless ``there``."""
    mask = there & (position < length)
    as_bytes = base.to(tl.pointer_type(tl.uint8), bitcast=True)
    rest = tl.load(as_bytes + position, mask=mask, other=0).to(tl.int32)
    if WORD32:
        halves = (base + byte_words).to(tl.pointer_type(tl.uint16), bitcast=True)
        rest = (rest << 16) | tl.load(halves + position, mask=mask, other=0).to(tl.int32)
    if SHIFT == 10:
        row = tl.arange(0, ROWS)
        plane_words = (length + 31) // 32
        for plane in tl.static_range(3):
            plane_bytes = (base + byte_words + plane * plane_words).to(
                tl.pointer_type(tl.uint8), bitcast=True
            )
            bits = tl.load(plane_bytes + row, mask=there & (row < 4 * plane_words), other=0).to(tl.int32)
            rest |= ((bits[:, None] >> tl.arange(0, 8)[None, :]) & 1) << (8 + plane)
    sign = (rest >> SHIFT) << (31 if WORD32 else 15)
    return sign | (rest & ((1 << SHIFT) - 1))


@triton.jit
def decode_exponents(
    table,
    block_segment,
    block_index,
    flags,
    multipliers,
    identity,
    block_size,
    WORD32: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program a hash block; FULL promises that it is whole."""
    ROWS: tl.constexpr = HASH_BLOCK // 8
    NUM: tl.constexpr = HASH_BLOCK // BLOCK
    pid = tl.program_id(0)
    segment = tl.load(block_segment + pid)
    block = tl.load(block_index + pid)
    entry = table + segment * DECODE_COLUMNS
    payload = tl.load(entry).to(tl.pointer_type(tl.uint32))
    num_bytes = tl.load(entry + 1)
    words = typed_pointer(tl.load(entry + 2), WORD32, ALIGNED)
    count = tl.load(entry + 3)
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

    # Step 1: header, descriptor, sizes. Of a payload that does not fit, nothing is believed.
    good = header_is_right(payload, num_bytes, count, identity, block_size)
    num_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    wanted = tl.load(payload + 16 + block, mask=good, other=0)
    descriptor = payload + 16 + num_blocks + 2 * block.to(tl.int64)
    offset = tl.load(descriptor, mask=good, other=0).to(tl.int64)
    layout = tl.load(descriptor + 1, mask=good, other=0)
    mode = (layout & 0xFFFF).to(tl.int32)
    top = ((layout >> 16) & 0xFF).to(tl.int32)
    is_raw = mode == RAW_MODE
    num_escapes = tl.where(is_raw, 0, mode)
    good &= num_escapes <= length
    num_escapes = tl.minimum(num_escapes, length)
    room = tl.minimum(tl.maximum(num_bytes // 4 - offset, 0), 1 << 20).to(tl.int32)
    body = payload + offset
    bitmap_words = ((length + BLOCK - 1) // BLOCK + 31) // 32
    byte_words = (length + 3) // 4
    rest_words = byte_words
    if WORD32:
        rest_words += (length + 1) // 2
    if SHIFT == 10:
        rest_words += 3 * ((length + 31) // 32)
    index = tl.arange(0, NUM)
    has_bitmap = good & (is_raw == 0) & (bitmap_words <= room)
    bit_words = tl.load(body + index // 32, mask=has_bitmap & (index * BLOCK < length), other=0)
    changed = ((bit_words >> (index % 32).to(tl.uint32)) & 1).to(tl.int32)
    rank = tl.cumsum(changed, 0) - changed
    nibble_words = tl.sum(changed, 0) * (BLOCK // 8)
    needed = bitmap_words + rest_words + nibble_words + num_escapes
    good &= is_raw | (needed <= room)

    # Step 2: merge old or new exponents with sign and mantissa.
    coded = good & (is_raw == 0)
    row_changed = rows_of_blocks(changed, ROWS, BLOCK)
    row_place = rows_of_blocks(rank, ROWS, BLOCK) * (BLOCK // 8) + row % (BLOCK // 8)
    nibbles = tl.load(body + bitmap_words + rest_words + row_place, mask=coded & (row_changed != 0), other=0)
    below = (nibbles.to(tl.int32, bitcast=True)[:, None] >> (4 * column)) & 15
    exponent = tl.where(row_changed[:, None] != 0, (top - below) & MASK, (old >> SHIFT) & MASK)
    rest = load_rest(body + bitmap_words, position, length, byte_words, coded, WORD32, SHIFT, ROWS)
    new = rest | (exponent << SHIFT)
    if is_raw:
        raw_there = room if WORD32 else room * 2
        good &= length <= raw_there
        raw_words = (payload + offset).to(tl.pointer_type(tl.int32 if WORD32 else tl.uint16), bitcast=True)
        new = tl.load(raw_words + position, mask=position < tl.minimum(length, raw_there), other=0).to(
            tl.int32
        )

    # Step 3: hash of the new words; escapes stand in it as nibble 15 and are put right.
    hashed = wrapping_sum(tl.sum(tl.where(valid, new, 0) * tl.load(multipliers + position), 1))
    escapes = body + bitmap_words + rest_words + nibble_words
    stand_in = (top - ESCAPE_NIBBLE) & MASK
    lane = tl.arange(0, 128)
    first = num_escapes * 0
    while first < num_escapes:
        there = (first + lane < num_escapes) & good
        escape = tl.load(escapes + first + lane, mask=there, other=0)
        place = (escape & 0xFFFF).to(tl.int32)
        outside = tl.sum((there & (place >= length)).to(tl.int32), 0)
        there &= place < length
        difference = ((escape >> 16).to(tl.int32) - stand_in) << SHIFT
        hashed += wrapping_sum(
            tl.where(there, difference * tl.load(multipliers + place, mask=there, other=0), 0)
        )
        good &= outside == 0
        first += 128
    good &= hashed.to(tl.uint32, bitcast=True) == wanted

    # Step 4: store, or report.
    if good:
        stored = new if WORD32 else new.to(tl.int16)
        if FULL:
            tl.store(words + position, stored)
        else:
            tl.store(words + position, stored, mask=valid)
        tl.debug_barrier()  # escapes change what the line above stored
        first = num_escapes * 0
        while first < num_escapes:
            there = first + lane < num_escapes
            escape = tl.load(escapes + first + lane, mask=there, other=0)
            place = (escape & 0xFFFF).to(tl.int32)
            difference = ((escape >> 16).to(tl.int32) - stand_in) << SHIFT
            here = tl.load(words + place, mask=there, other=0).to(tl.int32) + difference
            tl.store(words + place, here if WORD32 else here.to(tl.int16), mask=there)
            first += 128
    else:
        report_damage(flags + 2 * segment, block)
