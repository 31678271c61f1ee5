"""`delta` with the `packed` coder, decoding: codes, apply, check and store in one kernel. Format:
docs/codec.md.

Table: int64 [payloads, DECODE_COLUMNS] = (payload, its bytes, words, values). Nothing is read beyond a
payload's bytes and nothing is stored before a block's hash was found right.
"""

import triton
import triton.language as tl

from .bits import (
    HASH_BLOCK,
    apply_zigzag,
    clip_width,
    load_bit_window,
    split_chunks,
    upper_half,
    wrapping_sum,
)
from .delta_packed_encode import RAW_MODE, SAME_MODE, body_start, typed_pointer

DECODE_COLUMNS = tl.constexpr(4)


@triton.jit
def header_is_right(payload, num_bytes, count, identity, block_size, coder_version=0):
    there = num_bytes >= body_start(count)
    right = tl.load(payload, mask=there, other=0) == 0x41524943
    right &= tl.load(payload + 1, mask=there, other=0).to(tl.int32, bitcast=True) == identity
    right &= tl.load(payload + 2, mask=there, other=0) == (count & 0xFFFFFFFF).to(tl.uint32)
    right &= tl.load(payload + 3, mask=there, other=0) == (count >> 32).to(tl.uint32)
    right &= tl.load(payload + 6, mask=there, other=1) == 0
    right &= tl.load(payload + 7, mask=there, other=0) == block_size.to(tl.uint32)
    right &= tl.load(payload + 8, mask=there, other=0) == HASH_BLOCK
    right &= tl.load(payload + 9, mask=there, other=0).to(tl.int32, bitcast=True) == coder_version
    return right & there


@triton.jit
def load_codes(base, bits_before, chunk_bits, there, CHUNKS: tl.constexpr):
    """The 32-bit window of every chunk: uint32 [R, K]. ``chunk_bits`` is a tuple of K tensors."""
    first = load_bit_window(base, bits_before, there)
    second = load_bit_window(base, bits_before + chunk_bits[0], there)
    if CHUNKS == 2:
        return tl.join(first, second)
    else:
        third_start = bits_before + chunk_bits[0] + chunk_bits[1]
        third = load_bit_window(base, third_start, there)
        fourth = load_bit_window(base, third_start + chunk_bits[2], there)
        return tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [first.shape[0], 4])


@triton.jit
def decode_blocks(
    table,
    block_segment,
    block_index,
    flags,
    multipliers,
    identity,
    block_size,
    WORD32: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_A: tl.constexpr,
    MAX_B: tl.constexpr,
    EXPONENT_SHIFT: tl.constexpr,
    EXPONENT_MASK: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program a block of HASH_BLOCK values; FULL promises that the block is whole."""
    ROWS: tl.constexpr = HASH_BLOCK // 8
    CHUNKS: tl.constexpr = 8 // CHUNK
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
    words += start
    if FULL:
        old = tl.load(words + position)
    else:
        valid = position < length
        old = tl.load(words + position, mask=valid, other=0)

    # Step 1: header and descriptor. Of a payload that does not fit, nothing is believed.
    good = header_is_right(payload, num_bytes, count, identity, block_size)
    num_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    wanted = tl.load(payload + 16 + block, mask=good, other=0)
    descriptor = payload + 16 + num_blocks + 2 * block.to(tl.int64)
    offset = tl.load(descriptor, mask=good, other=0).to(tl.int64)
    layout = tl.load(descriptor + 1, mask=good, other=SAME_MODE)
    mode = (layout & 0xFFFF).to(tl.int32)
    is_same = mode == SAME_MODE
    is_raw = mode == RAW_MODE
    coded = (is_same == 0) & (is_raw == 0)
    # Unchanged blocks are coded blocks without bits: centres of 0 make every width 0.
    c1 = tl.where(coded, (layout >> 16) & 0xFF, 0).to(tl.int32)
    c2 = tl.where(coded, layout >> 24, 0).to(tl.int32)
    num_escapes = tl.where(coded, mode, 0)
    good &= num_escapes <= length
    num_escapes = tl.minimum(num_escapes, length)
    room = tl.minimum(tl.maximum(num_bytes // 4 - offset, 0), 1 << 20).to(tl.int32)
    body = payload + offset

    # Step 2: widths from the old exponents and the flags, places from one prefix sum, codes.
    flag_words = tl.where(coded, (length + 31) // 32, 0)
    flags_here = tl.load(
        body.to(tl.pointer_type(tl.uint8), bitcast=True) + row,
        mask=row < 4 * tl.minimum(flag_words, room),
        other=0,
    )
    far = (flags_here.to(tl.int32)[:, None] >> column) & 1
    old_half = upper_half(old, WORD32)
    exponent = (old_half >> EXPONENT_SHIFT) & EXPONENT_MASK
    a = clip_width(c1, exponent, MAX_A)
    width = tl.where(far != 0, clip_width(c2, exponent, MAX_B), a)
    if not FULL:
        width = tl.where(valid, width, 0)
    width_in_chunk = tl.reshape(width, [ROWS, CHUNKS, CHUNK])
    inside = tl.cumsum(width_in_chunk, 2) - width_in_chunk
    chunk_bits = tl.sum(width_in_chunk, 2)
    row_bits = tl.sum(chunk_bits, 1)
    bits_before = tl.cumsum(row_bits, 0) - row_bits
    code_words = (tl.sum(row_bits, 0) + 31) // 32
    escapes = body + flag_words + code_words
    needed = flag_words + code_words + num_escapes
    low_start = needed
    if WORD32:
        needed += tl.where(coded, (length + 1) // 2, 0)
    # Chunk windows reach two words beyond the codes; the zeros behind the last block are there for that.
    good &= is_raw | is_same | (needed + 2 <= room)
    window = load_codes(
        body + flag_words, bits_before, split_chunks(chunk_bits, CHUNKS), good & coded, CHUNKS
    )
    codes = (window[:, :, None] >> (inside & 31).to(tl.uint32)).to(tl.int32, bitcast=True)
    code = tl.reshape(codes, [ROWS, 8]) & ((1 << width) - 1)
    half = apply_zigzag(code + (far << a), old_half)
    if WORD32:
        low_words = (body + low_start).to(tl.pointer_type(tl.uint16), bitcast=True)
        low = tl.load(low_words + position, mask=good & coded & (position < length), other=0)
        new = (half << 16) | tl.where(coded, low.to(tl.int32), old & 0xFFFF)
    else:
        new = half & 0xFFFF
    if is_raw:
        raw_there = room if WORD32 else room * 2
        good &= length <= raw_there
        raw_words = (payload + offset).to(tl.pointer_type(tl.int32 if WORD32 else tl.uint16), bitcast=True)
        new = tl.load(raw_words + position, mask=position < tl.minimum(length, raw_there), other=0).to(
            tl.int32
        )

    # Step 3: hash of the new words, a sum. Escapes decoded to their old words; their part is put right.
    hashed = wrapping_sum(tl.sum(new * tl.load(multipliers + position), 1))
    lane = tl.arange(0, 128)
    first = num_escapes * 0
    while first < num_escapes:
        index = first + lane
        there = (index < num_escapes) & good
        escape = tl.load(escapes + index, mask=there, other=0)
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
        if is_same == 0:
            stored = new if WORD32 else new.to(tl.int16)
            if FULL:
                tl.store(words + position, stored)
            else:
                tl.store(words + position, stored, mask=valid)
            tl.debug_barrier()  # escapes overwrite what the line above stored
            first = num_escapes * 0
            while first < num_escapes:
                index = first + lane
                there = index < num_escapes
                escape = tl.load(escapes + index, mask=there, other=0)
                place = (escape & 0xFFFF).to(tl.int32)
                half_here = (escape >> 16).to(tl.int32)
                if WORD32:
                    low_here = tl.load(low_words + place, mask=there, other=0).to(tl.int32)
                    tl.store(words + place, (half_here << 16) | low_here, mask=there)
                else:
                    tl.store(words + place, half_here.to(tl.int16), mask=there)
                first += 128
    else:
        tl.atomic_add(flags + 2 * segment, 1, sem="relaxed")
        tl.atomic_min(flags + 2 * segment + 1, block, sem="relaxed")
