"""`delta` with the `packed` coder, encoding: choose widths, code blocks, write the total. Format:
docs/codec.md.

Table: int64 [segments, ENCODE_COLUMNS] = (new words, old words, out, values, first region). Payload sizes
grow by atomic additions to ``sizes``, so blocks lie in the order in which they were finished.
"""

import triton
import triton.language as tl

from .bits import (
    HASH_BLOCK,
    bit_length,
    clip_width,
    count_bits,
    split_chunks,
    store_bit_stream,
    upper_half,
    wrapping_sum,
    zigzag,
)

ENCODE_COLUMNS = tl.constexpr(5)
BITS_FIELD = tl.constexpr(18)  # row sums carry code bits below this bit and escapes above it
BITS_MASK = tl.constexpr((1 << 18) - 1)
TAIL_BYTES = tl.constexpr(8)
RAW_MODE, SAME_MODE = tl.constexpr(0xFFFF), tl.constexpr(0xFFFE)


@triton.jit
def body_start(count):
    """See packed_format.body_start."""
    blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    return (64 + 12 * blocks + 15) // 16 * 16


@triton.jit
def typed_pointer(address, WORD32: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to words; ALIGNED promises 16 bytes, which lets loads be vectors."""
    if WORD32:
        pointer = address.to(tl.pointer_type(tl.int32))
    else:
        pointer = address.to(tl.pointer_type(tl.int16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def write_header(out, count, identity, block_size):
    """Header with an empty size, and zeros between the descriptors and the body."""
    lane = tl.arange(0, 16)
    value = tl.where(lane == 0, 0x41524943, 0)
    value = tl.where(lane == 1, identity, value)
    value = tl.where(lane == 2, (count & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), value)
    value = tl.where(lane == 3, (count >> 32).to(tl.int32), value)
    value = tl.where(lane == 7, block_size, value)
    value = tl.where(lane == 8, HASH_BLOCK, value)
    tl.store(out + lane, value)
    front = 16 + 3 * ((count + HASH_BLOCK - 1) // HASH_BLOCK)
    tl.store(out + front + lane, 0, mask=(lane < 4) & (front + lane < body_start(count) // 4))


@triton.jit
def choose_centres(
    table,
    region_segment,
    centres,
    sizes,
    identity,
    block_size,
    WORD32: tl.constexpr,
    MAX_A: tl.constexpr,
    MAX_B: tl.constexpr,
    EXPONENT_SHIFT: tl.constexpr,
    EXPONENT_MASK: tl.constexpr,
    REGION: tl.constexpr,
    RUNS: tl.constexpr,
    LANES: tl.constexpr,
    SCALES: tl.constexpr,
    GAPS: tl.constexpr,
):
    """One program a region: (c1, c2) from a sample; a segment's first one also writes header and initial
    size."""
    pid = tl.program_id(0)
    segment = tl.load(region_segment + pid)
    entry = table + segment * ENCODE_COLUMNS
    new_words = typed_pointer(tl.load(entry), WORD32, False)
    old_words = typed_pointer(tl.load(entry + 1), WORD32, False)
    count = tl.load(entry + 3)
    region = pid - tl.load(entry + 4)
    if region == 0:
        write_header(tl.load(entry + 2).to(tl.pointer_type(tl.int32)), count, identity, block_size)
        tl.store(sizes + segment, body_start(count) + TAIL_BYTES)
    start = region * REGION
    length = tl.minimum(count - start, REGION).to(tl.int32)
    sample = tl.arange(0, RUNS * LANES)
    position = sample // LANES * (length // RUNS) + sample % LANES
    valid = position < length
    new_half = upper_half(tl.load(new_words + start + position, mask=valid, other=0), WORD32)
    old_half = upper_half(tl.load(old_words + start + position, mask=valid, other=0), WORD32)
    z = zigzag(new_half, old_half)
    exponent = (old_half >> EXPONENT_SHIFT) & EXPONENT_MASK
    changed = (z > 0) & valid
    num_changed = tl.sum(changed.to(tl.int32), 0)
    total = tl.sum(tl.where(changed, exponent + bit_length(z), 0), 0)
    highest = tl.max(tl.where(valid, exponent, 0), 0)
    mean = tl.where(num_changed > 0, (total + num_changed // 2) // tl.maximum(num_changed, 1), highest)
    mean = tl.minimum(tl.maximum(mean, 1), 248)
    step = tl.arange(0, SCALES)[None, :]
    c2 = mean - 1 + step
    best = 0x7FFFFFFF
    for gap in tl.static_range(GAPS):
        c1 = tl.maximum(c2 - 1 - gap, 0) if gap < GAPS - 1 else c2 * 0
        a = clip_width(c1, exponent[:, None], MAX_A)
        b = clip_width(c2, exponent[:, None], MAX_B)
        near = z[:, None] < (1 << a)
        far = z[:, None] < (1 << a) + (1 << b)
        cost = tl.where(valid[:, None], tl.where(near, a, tl.where(far, b, a + 32)), 0)
        ranked = tl.sum(cost, 0) * (SCALES * GAPS) + gap * SCALES + tl.arange(0, SCALES)
        best = tl.minimum(best, tl.min(ranked, 0))
    choice = best % (SCALES * GAPS)
    c2_best = mean - 1 + choice % SCALES
    gap_best = choice // SCALES
    c1_best = tl.where(gap_best == GAPS - 1, 0, tl.maximum(c2_best - 1 - gap_best, 0))
    tl.store(centres + pid, c1_best | (c2_best << 8))


@triton.jit
def store_escapes(base, new_words, escaped, row_rank, WORD32: tl.constexpr, ROWS: tl.constexpr):
    """Escaped values (bool [R, 8]) as position and word, in order; ``row_rank``: escapes in earlier
    rows, int32 [R]."""
    column = tl.arange(0, 8)[None, :]
    bits = tl.sum(tl.where(escaped, 1 << column, 0), 1)
    rank = row_rank[:, None] + count_bits(bits[:, None] & ((1 << column) - 1))
    position = tl.arange(0, ROWS)[:, None] * 8 + column
    half = upper_half(tl.load(new_words + position, mask=escaped, other=0), WORD32)
    tl.store(base + rank, (position | (half << 16)).to(tl.uint32, bitcast=True), mask=escaped)


@triton.jit
def encode_blocks(
    table,
    block_segment,
    block_index,
    centres,
    sizes,
    multipliers,
    WORD32: tl.constexpr,
    CHUNK: tl.constexpr,
    MAX_A: tl.constexpr,
    MAX_B: tl.constexpr,
    EXPONENT_SHIFT: tl.constexpr,
    EXPONENT_MASK: tl.constexpr,
    REGION_BLOCKS: tl.constexpr,
    FULL: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One program a block of HASH_BLOCK values; FULL promises that the block is whole."""
    ROWS: tl.constexpr = HASH_BLOCK // 8
    CHUNKS: tl.constexpr = 8 // CHUNK
    pid = tl.program_id(0)
    segment = tl.load(block_segment + pid)
    block = tl.load(block_index + pid)
    entry = table + segment * ENCODE_COLUMNS
    new_words = typed_pointer(tl.load(entry), WORD32, ALIGNED)
    old_words = typed_pointer(tl.load(entry + 1), WORD32, ALIGNED)
    out = tl.load(entry + 2)
    count = tl.load(entry + 3)
    centre = tl.load(centres + tl.load(entry + 4) + block // REGION_BLOCKS)
    start = block.to(tl.int64) * HASH_BLOCK
    length = tl.minimum(count - start, HASH_BLOCK).to(tl.int32)
    row = tl.arange(0, ROWS)
    position = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    if FULL:
        new = tl.load(new_words + start + position)
        old = tl.load(old_words + start + position)
    else:
        valid = position < length
        new = tl.load(new_words + start + position, mask=valid, other=0)
        old = tl.load(old_words + start + position, mask=valid, other=0)

    # Step 1: what each value costs. beyond = z - 2^a tells the three cases apart.
    old_half = upper_half(old, WORD32)
    new_half = upper_half(new, WORD32)
    z = zigzag(new_half, old_half)
    exponent = (old_half >> EXPONENT_SHIFT) & EXPONENT_MASK
    a = clip_width(centre & 255, exponent, MAX_A)
    b = clip_width(centre >> 8, exponent, MAX_B)
    beyond = z - (1 << a)
    near = beyond < 0
    escaped = (beyond >> b) > 0
    plain = near | escaped
    width = tl.where(plain, a, b)
    if not FULL:
        width = tl.where(valid, width, 0)
    code = tl.where(near, z, tl.where(escaped, 0, beyond))

    # Step 2: chunks of codes, their places, and the block's size.
    width_in_chunk = tl.reshape(width, [ROWS, CHUNKS, CHUNK])
    inside = tl.cumsum(width_in_chunk, 2) - width_in_chunk
    chunk = tl.sum(tl.reshape(code, [ROWS, CHUNKS, CHUNK]) << (inside & 31), 2)
    if WORD32:
        # Rows lie in two threads each, and a sum of escapes alone was compiled into one over bools moved
        # between threads, which came out wrong on an H200. Here they are counted along with the bits.
        cost = width + (escaped.to(tl.int32) << BITS_FIELD)
        chunk_sums = tl.sum(tl.reshape(cost, [ROWS, CHUNKS, CHUNK]), 2)
        chunk_bits = chunk_sums & BITS_MASK
        row_sums = tl.sum(chunk_sums, 1)
    else:
        chunk_bits = tl.sum(width_in_chunk, 2)
        row_sums = tl.sum(chunk_bits, 1) + (tl.sum(escaped.to(tl.int32), 1) << BITS_FIELD)
    before = tl.cumsum(row_sums, 0) - row_sums
    total = tl.sum(row_sums, 0)
    total_bits = total & BITS_MASK
    num_escapes = total >> BITS_FIELD
    word = new.to(tl.int32) if WORD32 else new_half & 0xFFFF
    hashed = wrapping_sum(tl.sum(word * tl.load(multipliers + position), 1))
    changed = tl.max(tl.max((new ^ old).to(tl.int32) & (-1 if WORD32 else 0xFFFF) != 0, 1).to(tl.int32), 0)
    flag_words = (length + 31) // 32
    code_words = (total_bits + 31) // 32
    coded_words = flag_words + code_words + num_escapes
    raw_bytes = length * 2
    if WORD32:
        coded_words += (length + 1) // 2
        raw_bytes = length * 4
    is_raw = coded_words * 4 >= raw_bytes
    num_words = tl.where(changed == 0, 0, tl.where(is_raw, (raw_bytes + 3) // 4, coded_words))
    mode = tl.where(changed == 0, SAME_MODE, tl.where(is_raw, RAW_MODE, num_escapes))
    offset = tl.atomic_add(sizes + segment, (num_words * 4).to(tl.int64), sem="relaxed") - TAIL_BYTES

    # Step 3: hash, descriptor, block.
    out_words = out.to(tl.pointer_type(tl.uint32))
    num_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    tl.store(out_words + 16 + block, hashed.to(tl.uint32, bitcast=True))
    descriptor = out_words + 16 + num_blocks + 2 * block.to(tl.int64)
    tl.store(descriptor, (offset // 4).to(tl.uint32))
    tl.store(descriptor + 1, mode.to(tl.uint32) | (centre.to(tl.uint32) << 16))
    body = out_words + offset // 4
    # Words are loaded again below: registers are scarcer than reads that hit the cache.
    padded = length if WORD32 else length + (length & 1)
    if (changed != 0) & is_raw:
        raw_body = (out + offset).to(tl.pointer_type(tl.int32 if WORD32 else tl.int16))
        raw = tl.load(new_words + start + position, mask=position < length, other=0)
        tl.store(raw_body + position, raw, mask=position < padded)
    if (changed != 0) & (is_raw == 0):
        flag_bits = tl.where(plain, 0, 1 << tl.arange(0, 8)[None, :])
        flags = body.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(flags + row, tl.sum(flag_bits, 1).to(tl.uint8), mask=row < 4 * flag_words)
        escapes = body + flag_words + code_words
        if num_escapes > 0:
            store_escapes(escapes, new_words + start, escaped, before >> BITS_FIELD, WORD32, ROWS)
        if WORD32:
            low = (escapes + num_escapes).to(tl.pointer_type(tl.int16), bitcast=True)
            again = tl.load(new_words + start + position, mask=position < length, other=0)
            tl.store(low + position, again.to(tl.int16), mask=position < length + (length & 1))
        store_bit_stream(
            body + flag_words,
            split_chunks(chunk.to(tl.uint32, bitcast=True), CHUNKS),
            split_chunks(chunk_bits, CHUNKS),
            before & BITS_MASK,
            total_bits,
            CHUNKS,
            ROWS,
        )


@triton.jit
def write_totals(table, sizes):
    """One program a segment: the final size into the header, zeros behind the last block."""
    segment = tl.program_id(0)
    out = tl.load(table + segment * ENCODE_COLUMNS + 2).to(tl.pointer_type(tl.int32))
    size = tl.load(sizes + segment)
    tl.store(out.to(tl.pointer_type(tl.int64), bitcast=True) + 2, size)
    tl.store(out + size // 4 - 2, 0)
    tl.store(out + size // 4 - 1, 0)
