"""`delta` with the `ans` coder: differences as bytes for nvCOMP, and apply, check and store. Format:
docs/codec.md. Table: ans_chunks.py.
"""

import triton
import triton.language as tl

from .ans_chunks import (
    AREA_WORDS,
    COLUMNS,
    COUNT_SHIFT,
    PLACE_MASK,
    SPLIT,
    available_symbols,
    chunk_table,
    fixed_start,
)
from .bits import HASH_BLOCK, row_ranks, signed_code, upper_half, wrapping_sum
from .delta_packed_decode import header_is_right, report_damage
from .lanes import typed_pointer


@triton.jit
def encode_symbols(
    table,
    block_segment,
    block_index,
    symbols,
    escapes,
    escape_counts,
    multipliers,
    WORD32: tl.constexpr,
    FULL: tl.constexpr,
):
    """One program a block of HASH_BLOCK values: symbols and escapes to scratch, its hash to the payload."""
    ROWS: tl.constexpr = HASH_BLOCK // 8
    pid = tl.program_id(0)
    entry = table + tl.load(block_segment + pid) * COLUMNS
    block = tl.load(block_index + pid)
    new_words = typed_pointer(tl.load(entry), WORD32, True)
    old_words = typed_pointer(tl.load(entry + 2), WORD32, True)
    payload = tl.load(entry + 1).to(tl.pointer_type(tl.uint32))
    count = tl.load(entry + 3)
    global_block = tl.load(entry + 4) + block
    start = block.to(tl.int64) * HASH_BLOCK
    length = tl.minimum(count - start, HASH_BLOCK).to(tl.int32)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, 8)[None, :]
    position = row[:, None] * 8 + column
    valid = position < length
    if FULL:
        new = tl.load(new_words + start + position)
        old = tl.load(old_words + start + position)
    else:
        new = tl.load(new_words + start + position, mask=valid, other=0)
        old = tl.load(old_words + start + position, mask=valid, other=0)
    new_half = upper_half(new, WORD32)
    difference = signed_code(new_half) - signed_code(upper_half(old, WORD32))
    escaped = (difference + 127).to(tl.uint32, bitcast=True) > 254
    escape_bits = tl.sum(tl.where(escaped, 1 << column, 0), 1)
    num_escapes = tl.sum(tl.sum(escaped.to(tl.int32), 1), 0)
    word = new.to(tl.int32) if WORD32 else new_half & 0xFFFF
    hashed = wrapping_sum(tl.sum(word * tl.load(multipliers + position), 1))
    tl.store(payload + 16 + block, hashed.to(tl.uint32, bitcast=True))
    # Where escapes cost more than the high bytes, the words are split into low and high bytes instead.
    is_split = num_escapes * 4 > length
    symbol = tl.where(is_split, new_half, tl.where(escaped, -128, difference))
    symbol_pointer = tl.multiple_of((symbols + global_block * HASH_BLOCK).to(tl.pointer_type(tl.int8)), 16)
    tl.store(symbol_pointer + position, symbol.to(tl.int8))
    tl.store(escape_counts + global_block, tl.where(is_split, SPLIT, num_escapes))
    area = escapes + global_block * (AREA_WORDS * 4)
    if is_split:
        high = (area.to(tl.pointer_type(tl.int8))) + position
        tl.store(high, (new_half >> 8).to(tl.int8), mask=position < (length + 3) // 4 * 4)
    elif num_escapes > 0:
        before, in_row = row_ranks(escape_bits, ROWS)
        record = position | (new_half << 16)
        tl.store(area.to(tl.pointer_type(tl.int32)) + before[:, None] + in_row, record, mask=escaped)
    if WORD32:
        fixed = fixed_start(count, tl.load(entry + 6), 0)
        low = (payload.to(tl.int64) + fixed + 2 * start).to(tl.pointer_type(tl.int16))
        tl.store(low + position, new.to(tl.int16), mask=position < length + (length & 1))


@triton.jit
def apply_symbols(
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
    FULL: tl.constexpr,
):
    """One program a block: new words from symbols, escapes and old words, stored if their hash is right."""
    ROWS: tl.constexpr = HASH_BLOCK // 8
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
    position = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    valid = position < length
    words += start
    if FULL:
        old = tl.load(words + position)
    else:
        old = tl.load(words + position, mask=valid, other=0)

    # Step 1: header, tables, bounds. Of a payload that does not fit, nothing is believed.
    good = (num_bytes >= tl.load(entry + 7)) & header_is_right(
        payload, num_bytes, count, identity, block_size, coder_version
    )
    hash_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    wanted = tl.load(payload + 16 + block, mask=good, other=0)
    described = tl.load(payload + 16 + hash_blocks + block, mask=good, other=0)
    index = (start // values_per_chunk).to(tl.int32)
    chunk = tl.load(entry + 5) + index
    inside = (start % values_per_chunk).to(tl.int32)
    good &= inside + length <= available_symbols(uncoded_bytes, decoded_bytes, statuses, capacities, chunk)
    chunk_entry = chunk_table(payload, count) + 3 * index
    stored = (tl.load(chunk_entry + 1, mask=good, other=0) & 0x7FFFFFFF).to(tl.int64)
    area_start = tl.load(chunk_entry, mask=good, other=0).to(tl.int64) * 16 + (stored + 15) // 16 * 16
    area_start += (described & PLACE_MASK).to(tl.int64) * 4
    num_escapes = (described >> COUNT_SHIFT).to(tl.int32)
    is_split = num_escapes == SPLIT
    area_words = tl.where(is_split, (length + 3) // 4, num_escapes)
    good &= (area_words <= AREA_WORDS) & (area_start + area_words * 4 <= num_bytes)
    num_escapes = tl.where(is_split | (good == 0), 0, num_escapes)
    area = (address + area_start).to(tl.pointer_type(tl.uint32))

    # Step 2: apply. A value with an escape stays at its old word until the end.
    symbol_pointer = (tl.load(symbol_places + chunk) + inside).to(tl.pointer_type(tl.int8))
    symbol_pointer = tl.multiple_of(symbol_pointer, 16)
    if FULL:
        symbol = tl.load(symbol_pointer + position, mask=good, other=0).to(tl.int32)
    else:
        symbol = tl.load(symbol_pointer + position, mask=good & valid, other=0).to(tl.int32)
    old_half = upper_half(old, WORD32)
    half = signed_code(signed_code(old_half) + tl.where(symbol == -128, 0, symbol))
    if is_split:
        high = tl.load(
            area.to(tl.pointer_type(tl.uint8), bitcast=True) + position, mask=good & valid, other=0
        )
        half = (symbol & 0xFF) | (high.to(tl.int32) << 8)
    if WORD32:
        low_start = address + fixed_start(count, values_per_chunk, 0) + 2 * start
        low_words = low_start.to(tl.pointer_type(tl.uint16))
        low = tl.load(low_words + position, mask=good & valid, other=0).to(tl.int32)
        new = (half << 16) | low
    else:
        new = half & 0xFFFF
    if not FULL:
        new = tl.where(valid, new, 0)

    # Step 3: hash of the new words, a sum; the part of values with an escape is put right.
    hashed = wrapping_sum(tl.sum(new * tl.load(multipliers + position), 1))
    lane = tl.arange(0, 128)
    first = num_escapes * 0
    while first < num_escapes:
        there = first + lane < num_escapes
        escape = tl.load(area + first + lane, mask=there, other=0)
        place = (escape & 0xFFFF).to(tl.int32)
        outside = tl.sum((there & (place >= length)).to(tl.int32), 0)
        there &= place < length
        old_here = upper_half(tl.load(words + place, mask=there, other=0), WORD32) & 0xFFFF
        difference = (escape >> 16).to(tl.int32) - old_here
        if WORD32:
            difference = difference << 16
        factor = tl.load(multipliers + place, mask=there, other=0)
        hashed += wrapping_sum(tl.where(there, difference * factor, 0))
        good &= outside == 0
        first += 128
    good &= hashed.to(tl.uint32, bitcast=True) == wanted

    # Step 4: store, or report.
    if good:
        out = new if WORD32 else new.to(tl.int16)
        if FULL:
            tl.store(words + position, out)
        else:
            tl.store(words + position, out, mask=valid)
        tl.debug_barrier()  # escapes overwrite what the line above stored
        first = num_escapes * 0
        while first < num_escapes:
            there = first + lane < num_escapes
            escape = tl.load(area + first + lane, mask=there, other=0)
            place = (escape & 0xFFFF).to(tl.int32)
            half_here = (escape >> 16).to(tl.int32)
            if WORD32:
                low_here = tl.load(low_words + place, mask=there, other=0).to(tl.int32)
                tl.store(words + place, (half_here << 16) | low_here, mask=there)
            else:
                tl.store(words + place, half_here.to(tl.int16), mask=there)
            first += 128
    else:
        report_damage(flags + 2 * segment, block)
