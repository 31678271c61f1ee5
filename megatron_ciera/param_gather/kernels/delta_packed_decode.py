"""`delta` with the `packed` coder, decoding: codes, apply, check and store in one kernel. Format:
docs/codec.md.

Table: int64 [payloads, DECODE_COLUMNS] = (payload, its bytes, words, values). Nothing is read beyond a
payload's bytes and nothing is stored before a block's hash was found right.
"""

import triton
import triton.language as tl

from .bits import HASH_BLOCK, wrapping_sum
from .delta_packed_encode import copy_words
from .lanes import (
    LANES,
    POSITION_BITS,
    RAW_MODE,
    SAME_MODE,
    STEP,
    TAIL_WORDS,
    VALUES,
    body_start,
    exponent_of,
    flag_bit,
    hash_quad,
    load_pairs,
    load_quad,
    position_factor,
    store_quad,
    typed_pointer,
)

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
def report_damage(flags, block):
    tl.atomic_add(flags, 1, sem="relaxed")
    tl.atomic_min(flags + 1, block, sem="relaxed")


@triton.jit
def check_words(words, wanted, word_factors, WORDS: tl.constexpr):
    """Whether a whole block of 32-bit words has the hash ``wanted``."""
    lane = tl.arange(0, STEP)
    hashed = tl.zeros([STEP], tl.int32)
    for first in range(0, WORDS, STEP):
        hashed += tl.load(words + first + lane) * tl.load(word_factors + first + lane)
    return wrapping_sum(hashed) == wanted


@triton.jit
def decode_coded(
    payload,
    offset,
    room,
    layout,
    words,
    wanted,
    lane_factors,
    word_factors,
    WORD32: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
):
    """A coded block, ``offset`` 32-bit words into the payload, with ``room`` words from there to its end.
    Returns whether it was right and is stored."""
    lane = tl.arange(0, LANES)
    num_escapes = layout & 0xFFFF
    centre = (layout >> 16) & 0xFF
    step = (layout >> 24) & 0xFF
    body = payload + offset
    flags = body + LANES // 4
    lows = flags + VALUES // 32 * LANES
    fixed_words = LANES // 4 + VALUES // 32 * LANES
    if WORD32:
        fixed_words += HASH_BLOCK // 2
    records = body + fixed_words
    lane_bytes = tl.load(body.to(tl.pointer_type(tl.uint8), bitcast=True) + lane).to(tl.int32)
    first_byte = tl.cumsum(lane_bytes, 0) - lane_bytes
    stream_start = fixed_words + num_escapes + (first_byte >> 2)
    # No lane's codes reach further than TAIL_WORDS. One whose place is wrong reads the payload's front.
    stream = payload + tl.where(stream_start + TAIL_WORDS <= room, offset + stream_start, 0)

    # Step 1: codes to words; values with a record keep their old upper half for now.
    new_pairs = ()
    place = (first_byte & 3) * 8
    hashed = tl.zeros([LANES], tl.int32)
    for g in tl.static_range(VALUES // 8):
        if g % 4 == 0:
            near = tl.load(flags + g // 4 * LANES + lane)
        old_pairs = load_pairs(words, lane, g, WORD32)
        group = ()
        for c in tl.static_range(8 // CHUNK):
            here = stream + (place >> 5)
            low = tl.load(here).to(tl.uint32, bitcast=True).to(tl.uint64)
            high = tl.load(here + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
            window = ((low | (high << 32)) >> (place & 31).to(tl.uint64)).to(tl.uint32)
            done = ()
            for i in tl.static_range(CHUNK // 2):  # the last value's code comes first
                old_pair = old_pairs[(c + 1) * (CHUNK // 2) - 1 - i]
                moved = ()
                for k in tl.static_range(2):
                    exponent = exponent_of(old_pair, 1 - k, SHIFT, MASK)
                    b = tl.minimum(tl.maximum(centre - exponent, 0), MAX_WIDTH)
                    a = tl.maximum(b - step, 0)
                    is_near = (near & flag_bit(31 - (g * 8 + (c + 1) * CHUNK - 1 - 2 * i - k) % 32)) != 0
                    width = tl.where(is_near, a, b)
                    z = window.to(tl.int32, bitcast=True) & ~(-1 << width)
                    z += tl.where(is_near, 0, 1 << a)
                    window = window >> width.to(tl.uint32)
                    place += width
                    difference = (z >> 1) ^ -(z & 1)
                    moved = moved + (old_pair + (difference << (16 * (1 - k))),)
                done = ((moved[1] & 0xFFFF) | (moved[0] & -65536),) + done
            group = group + done
        new_pairs = new_pairs + group
        if WORD32:
            lows4 = load_quad(lows, lane, g)
            hashed += hash_quad(2 * g, *words_of(group[0], lows4[0]), *words_of(group[1], lows4[1]))
            hashed += hash_quad(2 * g + 1, *words_of(group[2], lows4[2]), *words_of(group[3], lows4[3]))
        else:
            hashed += hash_quad(g, group[0], group[1], group[2], group[3])
    hashed *= tl.load(lane_factors + lane)

    # Step 2: the hash is a sum, to which records add their differences.
    first_record = num_escapes * 0
    while first_record < num_escapes:
        index = first_record + lane
        there = index < num_escapes
        record = tl.load(records + index, mask=there, other=0)
        factor = position_factor(word_factors, record & (HASH_BLOCK - 1), there, WORD32)
        if WORD32:
            factor = factor << 16
        hashed += (record >> POSITION_BITS) * factor
        first_record += LANES
    good = wrapping_sum(hashed) == wanted

    # Step 3: store.
    if good:
        for g in tl.static_range(VALUES // 8):
            first, second = new_pairs[4 * g], new_pairs[4 * g + 1]
            third, fourth = new_pairs[4 * g + 2], new_pairs[4 * g + 3]
            if WORD32:
                lows4 = load_quad(lows, lane, g)
                store_quad(words, lane, 2 * g, *words_of(first, lows4[0]), *words_of(second, lows4[1]), None)
                store_quad(
                    words, lane, 2 * g + 1, *words_of(third, lows4[2]), *words_of(fourth, lows4[3]), None
                )
            else:
                store_quad(words, lane, g, first, second, third, fourth, None)
        if num_escapes > 0:
            tl.debug_barrier()  # records change what the lines above stored
            halves = words.to(tl.pointer_type(tl.int16), bitcast=True)
            first_record = num_escapes * 0
            while first_record < num_escapes:
                index = first_record + lane
                there = index < num_escapes
                record = tl.load(records + index, mask=there, other=0)
                position = record & (HASH_BLOCK - 1)
                if WORD32:
                    position = 2 * position + 1
                half = tl.load(halves + position, mask=there, other=0) + (record >> POSITION_BITS)
                tl.store(halves + position, half.to(tl.int16), mask=there)
                first_record += LANES
    return good


@triton.jit
def words_of(pair, low_pair):
    """The two fp32 words of a pair of upper and one of lower halves."""
    return (low_pair & 0xFFFF) | (pair << 16), ((low_pair >> 16) & 0xFFFF) | (pair & -65536)


@triton.jit
def decode_raw(body, words, wanted, word_factors, WORDS: tl.constexpr):
    """A whole block that is stored as it is. Returns whether it was right and is stored."""
    good = check_words(body, wanted, word_factors, WORDS)
    if good:
        copy_words(body, words, WORDS)
    return good


@triton.jit
def decode_tail(body, room, mode, words, length, wanted, word_factors, WORD32: tl.constexpr):
    """The last block of a segment that is not whole: unchanged or raw. Returns whether it was right."""
    lane = tl.arange(0, STEP)
    is_raw = mode == RAW_MODE
    there = room if WORD32 else room * 2
    good = is_raw & (length <= there) | (mode == SAME_MODE)
    source = words
    if is_raw:
        source = body
    hashed = tl.zeros([STEP], tl.int32)
    end = tl.where(good, length, 0)
    first = length * 0
    while first < end:
        position = first + lane
        word = tl.load(source + position, mask=position < length, other=0).to(tl.int32)
        if not WORD32:
            word &= 0xFFFF
        hashed += word * position_factor(word_factors, position, position < length, WORD32)
        first += STEP
    good &= wrapping_sum(hashed) == wanted
    end = tl.where(good & is_raw, length, 0)
    first = length * 0
    while first < end:
        position = first + lane
        word = tl.load(source + position, mask=position < length, other=0)
        tl.store(words + position, word, mask=position < length)
        first += STEP
    return good


@triton.jit(
    do_not_specialize=["identity", "block_size"],
    do_not_specialize_on_alignment=["table", "block_segment", "block_index", "flags"],
)
def decode_blocks(
    table,
    block_segment,
    block_index,
    flags,
    lane_factors,
    word_factors,
    identity,
    block_size,
    WORD32: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
):
    """One program a block; an empty segment has one empty block."""
    RAW_WORDS: tl.constexpr = HASH_BLOCK if WORD32 else HASH_BLOCK // 2
    pid = tl.program_id(0)
    segment = tl.load(block_segment + pid)
    block = tl.load(block_index + pid)
    entry = table + segment * DECODE_COLUMNS
    address = tl.load(entry)
    payload = address.to(tl.pointer_type(tl.int32))
    num_bytes = tl.load(entry + 1)
    target = tl.load(entry + 2)
    count = tl.load(entry + 3)
    start = block.to(tl.int64) * HASH_BLOCK
    target += start * (4 if WORD32 else 2)
    length = tl.minimum(count - start, HASH_BLOCK).to(tl.int32)

    # Of a payload that does not fit, nothing is believed.
    good = (num_bytes >= body_start(count) + TAIL_WORDS * 4) & header_is_right(
        payload.to(tl.pointer_type(tl.uint32), bitcast=True), num_bytes, count, identity, block_size
    )
    good &= length > 0
    num_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    wanted = tl.load(payload + 16 + block, mask=good, other=0)
    descriptor = payload + 16 + num_blocks + 2 * block.to(tl.int64)
    offset = tl.load(descriptor, mask=good, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    layout = tl.load(descriptor + 1, mask=good, other=0)
    mode = layout & 0xFFFF
    room = tl.minimum(tl.maximum(num_bytes // 4 - offset, 0), 1 << 20).to(tl.int32)
    body = payload + offset
    words = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    if good:
        if length < HASH_BLOCK:
            good = decode_tail(
                typed_pointer(address + offset * 4, WORD32, False),
                room,
                mode,
                typed_pointer(target, WORD32, False),
                length,
                wanted,
                word_factors,
                WORD32,
            )
        elif mode == SAME_MODE:
            good = check_words(words, wanted, word_factors, RAW_WORDS)
        elif mode == RAW_MODE:
            good = room >= RAW_WORDS
            if good:
                good = decode_raw(body, words, wanted, word_factors, RAW_WORDS)
        else:
            FIXED: tl.constexpr = LANES // 4 + VALUES // 32 * LANES + (HASH_BLOCK // 2 if WORD32 else 0)
            good = (mode <= HASH_BLOCK) & (FIXED + mode <= room)
            if good:
                good = decode_coded(
                    payload,
                    offset,
                    room,
                    layout,
                    words,
                    wanted,
                    lane_factors,
                    word_factors,
                    WORD32,
                    CHUNK,
                    MAX_WIDTH,
                    SHIFT,
                    MASK,
                )
    if (good == 0) & (length > 0):
        report_damage(flags + 2 * segment, block)
