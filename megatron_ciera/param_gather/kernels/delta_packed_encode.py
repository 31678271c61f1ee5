"""`delta` with the `packed` coder, encoding, in one kernel. Format: docs/codec.md.

Table: int64 [segments, ENCODE_COLUMNS] = (new words, old words, out, values, cursor). The cursor starts at
the body's first 32-bit word and grows by atomic additions, so blocks lie in the order in which they were
finished; above CURSOR_BITS it counts them, and the block that finds all others counted finishes the payload.
"""

import triton
import triton.language as tl

from .bits import HASH_BLOCK, bit_length, wrapping_sum
from .lanes import (
    LANES,
    POSITION_BITS,
    RAW_MODE,
    SAME_MODE,
    STEP,
    TAIL_WORDS,
    VALUES,
    body_start,
    combine_lanes,
    count_bits32,
    exponent_of,
    load_pairs,
    lowest_bit_index,
    position_factor,
    store_quad,
    typed_pointer,
    value_position,
)

ENCODE_COLUMNS = tl.constexpr(5)
CURSOR_BITS = tl.constexpr(40)
SAMPLES = tl.constexpr(2)  # pairs of every lane that decide the widths
SPARSE_STEP = tl.constexpr(15)


@triton.jit
def write_header(out, count, identity, block_size):
    """Header but for the size, and zeros between the descriptors and the body."""
    lane = tl.arange(0, 16)
    value = tl.where(lane == 0, 0x41524943, 0)
    value = tl.where(lane == 1, identity, value)
    value = tl.where(lane == 2, (count & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), value)
    value = tl.where(lane == 3, (count >> 32).to(tl.int32), value)
    value = tl.where(lane == 7, block_size, value)
    value = tl.where(lane == 8, HASH_BLOCK, value)
    tl.store(out + lane, value, mask=(lane != 4) & (lane != 5))
    front = 16 + 3 * ((count + HASH_BLOCK - 1) // HASH_BLOCK)
    tl.store(out + front + lane, 0, mask=(lane < 4) & (front + lane < body_start(count) // 4))


@triton.jit
def place_block(entry, sizes, out, count, block, num_words, hashed, layout):
    """Reserve ``num_words`` and write hash and descriptor; the segment's last block also writes its size.
    Returns the block's first 32-bit word."""
    num_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    one = tl.full([], 1, tl.int64) << CURSOR_BITS
    ticket = tl.atomic_add(entry + 4, one + num_words, sem="relaxed")
    offset = ticket & (one - 1)
    if (ticket >> CURSOR_BITS) + 1 >= num_blocks:
        lane = tl.arange(0, 32)
        end = offset + num_words
        tl.store(out + end + lane, 0, mask=lane < TAIL_WORDS)
        size = (end + TAIL_WORDS) * 4
        tl.store(sizes, size)
        tl.store(out.to(tl.pointer_type(tl.int64), bitcast=True) + 2, size)
    if num_blocks > 0:
        tl.store(out + 16 + block, hashed)
        descriptor = out + 16 + num_blocks + 2 * block.to(tl.int64)
        tl.store(descriptor, offset.to(tl.int32))
        tl.store(descriptor + 1, layout)
    return offset


@triton.jit
def zigzag(new_pair, old_pair, HALF: tl.constexpr):
    """0, 1, 2, 3, 4 … for new - old = 0, -1, 1, -2, 2 … modulo 2^16, of one half of pairs."""
    if HALF == 0:
        difference = (new_pair - old_pair) << 16
    else:
        difference = (new_pair & -65536) - (old_pair & -65536)
    return (difference >> 15) ^ (difference >> 31)


@triton.jit
def choose_widths(new_words, old_words, lane, WORD32: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """(centre, step) of a block from a sample: see packed_format."""
    gathered = tl.zeros([LANES], tl.int32)
    for s in tl.static_range(SAMPLES):
        new_pairs = load_pairs(new_words, lane, s * (VALUES // 8 // SAMPLES), WORD32)
        old_pairs = load_pairs(old_words, lane, s * (VALUES // 8 // SAMPLES), WORD32)
        for half in tl.static_range(2):
            z = zigzag(new_pairs[0], old_pairs[0], half)
            scale = exponent_of(old_pairs[0], half, SHIFT, MASK) + bit_length(z)
            gathered += tl.where(z > 0, (scale << 12) + 1, 0)
    gathered = tl.sum(gathered, 0)
    changed = gathered & 4095
    centre = ((gathered >> 12) * 20 + changed * 33) // (tl.maximum(changed, 1) * 20)
    dense = changed * 2 >= 2 * SAMPLES * LANES
    return tl.minimum(centre, 255), tl.where(dense, 2, SPARSE_STEP)


@triton.jit
def encode_whole(
    entry,
    sizes,
    block,
    lane_factors,
    WORD32: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
):
    """A block of HASH_BLOCK values."""
    RAW_WORDS: tl.constexpr = HASH_BLOCK if WORD32 else HASH_BLOCK // 2
    start = block.to(tl.int64) * (4 * RAW_WORDS)
    new_words = tl.multiple_of((tl.load(entry) + start).to(tl.pointer_type(tl.int32)), 16)
    old_words = tl.multiple_of((tl.load(entry + 1) + start).to(tl.pointer_type(tl.int32)), 16)
    out = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
    count = tl.load(entry + 3)
    lane = tl.arange(0, LANES)
    centre, step = choose_widths(new_words, old_words, lane, WORD32, SHIFT, MASK)

    # Step 1: code every lane's values; nothing crosses lanes.
    chunks = ()
    chunk_bits = ()
    near_flags = ()
    escape_flags = ()
    hashed = tl.zeros([LANES], tl.int32)
    changed = tl.zeros([LANES], tl.int32)
    near = tl.zeros([LANES], tl.int32)
    fitting = tl.zeros([LANES], tl.int32)
    lane_bits = tl.zeros([LANES], tl.int32)
    for g in tl.static_range(VALUES // 8):
        new_pairs = load_pairs(new_words, lane, g, WORD32)
        old_pairs = load_pairs(old_words, lane, g, WORD32)
        hashed += new_pairs[4]
        for c in tl.static_range(8 // CHUNK):
            chunk = tl.zeros([LANES], tl.int32)
            bits = tl.zeros([LANES], tl.int32)
            for i in tl.static_range(CHUNK // 2):
                new_pair = new_pairs[c * (CHUNK // 2) + i]
                old_pair = old_pairs[c * (CHUNK // 2) + i]
                changed |= new_pair ^ old_pair
                if WORD32:
                    changed |= new_pairs[5 + c * (CHUNK // 2) + i] ^ old_pairs[5 + c * (CHUNK // 2) + i]
                for half in tl.static_range(2):
                    z = zigzag(new_pair, old_pair, half)
                    exponent = exponent_of(old_pair, half, SHIFT, MASK)
                    b = tl.minimum(tl.maximum(centre - exponent, 0), MAX_WIDTH)
                    a = tl.maximum(b - step, 0)
                    beyond_far = z - (1 << a) - (1 << b)  # negative unless it needs a record
                    fitting = (fitting << 1) | ((beyond_far >> 31) & 1)
                    z = tl.where(beyond_far < 0, z, 0)
                    beyond = z - (1 << a)  # negative: near
                    near = (near << 1) | ((beyond >> 31) & 1)
                    width = tl.where(beyond < 0, a, b)
                    code = tl.minimum(z.to(tl.uint32, bitcast=True), beyond.to(tl.uint32, bitcast=True))
                    chunk = (chunk << width) | code.to(tl.int32, bitcast=True)
                    bits += width
            chunks = chunks + (chunk,)
            chunk_bits = chunk_bits + (bits,)
            lane_bits += bits
        if g % 4 == 3:
            near_flags = near_flags + (near,)
            escape_flags = escape_flags + (~fitting,)

    # Step 2: sizes and places.
    lane_bytes = (lane_bits + 7) >> 3
    lane_escapes = count_bits32(escape_flags[0]) + count_bits32(escape_flags[1])
    sized = lane_bytes | (lane_escapes << 16)
    before = tl.cumsum(sized, 0) - sized
    hashed *= tl.load(lane_factors + lane)
    total, block_hash, block_changed, most = tl.reduce(
        (sized, hashed, changed, lane_escapes), 0, combine_lanes
    )
    num_escapes = total >> 16
    fixed_words = LANES // 4 + VALUES // 32 * LANES
    if WORD32:
        fixed_words += HASH_BLOCK // 2
    coded_words = fixed_words + num_escapes + ((total & 0xFFFF) + 3 >> 2)
    is_same = block_changed == 0
    is_raw = (coded_words >= RAW_WORDS) & (is_same == 0)
    is_coded = (is_raw == 0) & (is_same == 0)
    num_words = tl.where(is_same, 0, tl.where(is_raw, RAW_WORDS, coded_words))
    mode = tl.where(is_same, SAME_MODE, tl.where(is_raw, RAW_MODE, num_escapes))
    layout = mode | (centre << 16) | (step << 24)
    body = out + place_block(entry, sizes, out, count, block, num_words, block_hash, layout)

    # Step 3: store. Masks and no branch: a compiler would move most of step 1 into it, and keep its inputs.
    everywhere = is_coded & (lane >= 0)
    tl.store(body.to(tl.pointer_type(tl.int8), bitcast=True) + lane, lane_bytes.to(tl.int8), mask=everywhere)
    flags = body + LANES // 4
    for q in tl.static_range(VALUES // 32):
        tl.store(flags + q * LANES + lane, near_flags[q], mask=everywhere)
    lows = flags + VALUES // 32 * LANES
    if WORD32:
        for g in tl.static_range(VALUES // 8):
            again = load_pairs(new_words, lane, g, WORD32)
            store_quad(lows, lane, g, again[5], again[6], again[7], again[8], everywhere[:, None])
    records = body + fixed_words
    first_byte = before & 0xFFFF
    stream = records + num_escapes + (first_byte >> 2)
    word = tl.zeros([LANES], tl.int32)
    place = (first_byte & 3) * 8
    open_word = tl.zeros([LANES], tl.uint32)
    for j in tl.static_range(VALUES // CHUNK):
        shifted = chunks[j].to(tl.uint32, bitcast=True).to(tl.uint64) << place.to(tl.uint64)
        open_word |= shifted.to(tl.uint32)
        place += chunk_bits[j]
        full = place >= 32
        tl.store(stream + word, open_word.to(tl.int32, bitcast=True), mask=full & is_coded)
        open_word = tl.where(full, (shifted >> 32).to(tl.uint32), open_word)
        word += place >> 5
        place &= 31
    # A lane's first word may have had the last bytes of lanes before it, which come now.
    tl.debug_barrier()
    last_bytes = (stream + word).to(tl.pointer_type(tl.uint8), bitcast=True)
    first_here = tl.where(word == 0, first_byte & 3, 0)
    for k in tl.static_range(4):
        there = (k >= first_here) & (place > 0) & ((k * 8 < place) | (lane == LANES - 1)) & is_coded
        tl.store(last_bytes + k, (open_word >> (8 * k)).to(tl.uint8), mask=there)
    if is_coded & (num_escapes > 0):
        record = records + (before >> 16)
        left, later = escape_flags[0], escape_flags[1]
        while most > 0:
            in_first = left != 0
            flags_here = tl.where(in_first, left, later)
            there = flags_here != 0
            value = tl.where(in_first, 31, 63) - lowest_bit_index(flags_here)
            position = value_position(value, lane, WORD32)
            new = load_half(new_words, position, there, WORD32)
            old = load_half(old_words, position, there, WORD32)
            tl.store(record, position | ((new - old) << POSITION_BITS), mask=there)
            record += there.to(tl.int32)
            later = tl.where(in_first, later, later & (later - 1))
            left &= left - 1
            most -= 1
    if is_raw:
        copy_words(new_words, body, RAW_WORDS)


@triton.jit
def copy_words(source, target, WORDS: tl.constexpr):
    lane = tl.arange(0, STEP)
    for first in range(0, WORDS, STEP):
        tl.store(target + first + lane, tl.load(source + first + lane))


@triton.jit
def load_half(words, position, there, WORD32: tl.constexpr):
    """Upper half of fp32 words or 16-bit words at positions of a block, as int32 in [0, 65535]."""
    halves = words.to(tl.pointer_type(tl.uint16), bitcast=True)
    if WORD32:
        half = tl.load(halves + 2 * position + 1, mask=there, other=0)
    else:
        half = tl.load(halves + position, mask=there, other=0)
    return half.to(tl.int32)


@triton.jit
def encode_tail(entry, sizes, block, word_factors, WORD32: tl.constexpr):
    """The last block of a segment that is not whole: unchanged or raw."""
    start = block.to(tl.int64) * HASH_BLOCK
    new_words = typed_pointer(tl.load(entry), WORD32, False) + start
    old_words = typed_pointer(tl.load(entry + 1), WORD32, False) + start
    out = tl.load(entry + 2).to(tl.pointer_type(tl.int32))
    count = tl.load(entry + 3)
    length = (count - start).to(tl.int32)
    lane = tl.arange(0, STEP)
    hashed = tl.zeros([STEP], tl.int32)
    changed = tl.zeros([STEP], tl.int32)
    first = length * 0
    while first < length:
        position = first + lane
        new = tl.load(new_words + position, mask=position < length, other=0).to(tl.int32)
        changed |= new ^ tl.load(old_words + position, mask=position < length, other=0).to(tl.int32)
        if not WORD32:
            new &= 0xFFFF
        hashed += new * position_factor(word_factors, position, position < length, WORD32)
        first += STEP
    block_hash = wrapping_sum(hashed)
    is_same = tl.max((changed != 0).to(tl.int32), 0) == 0
    num_words = length if WORD32 else (length + 1) // 2
    num_words = tl.where(is_same, 0, num_words)
    mode = tl.where(is_same, SAME_MODE, RAW_MODE)
    offset = place_block(entry, sizes, out, count, block, num_words, block_hash, mode)
    body = typed_pointer(tl.load(entry + 2) + offset * 4, WORD32, False)
    padded = num_words if WORD32 else 2 * num_words
    first = length * 0
    while first < padded:
        position = first + lane
        new = tl.load(new_words + position, mask=position < length, other=0)
        tl.store(body + position, new, mask=position < padded)
        first += STEP


@triton.jit(
    do_not_specialize=["identity", "block_size"],
    do_not_specialize_on_alignment=["table", "block_segment", "block_index", "sizes"],
)
def encode_blocks(
    table,
    block_segment,
    block_index,
    sizes,
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
    """One program a block; an empty segment has one empty block. ``sizes``: int64 [segments]."""
    pid = tl.program_id(0)
    segment = tl.load(block_segment + pid)
    block = tl.load(block_index + pid)
    entry = table + segment * ENCODE_COLUMNS
    count = tl.load(entry + 3)
    if block == 0:
        write_header(tl.load(entry + 2).to(tl.pointer_type(tl.int32)), count, identity, block_size)
    if count - block.to(tl.int64) * HASH_BLOCK >= HASH_BLOCK:
        encode_whole(entry, sizes + segment, block, lane_factors, WORD32, CHUNK, MAX_WIDTH, SHIFT, MASK)
    else:
        encode_tail(entry, sizes + segment, block, word_factors, WORD32)
