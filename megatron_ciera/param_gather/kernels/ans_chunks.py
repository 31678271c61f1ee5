"""Around nvCOMP: headers, places of chunks, moving them together, and what the decoder gives to nvCOMP.
Format: docs/codec.md.

Table: int64 [segments, COLUMNS] = (words, payload, state or payload's bytes, values, first block, first chunk,
values a chunk, first byte of the chunks). Blocks and chunks are counted over all segments of a call.
"""

import triton
import triton.language as tl

from .bits import HASH_BLOCK
from .delta_packed_decode import header_is_right

COLUMNS = tl.constexpr(8)
SPLIT, COUNT_SHIFT = tl.constexpr(0xFFF), tl.constexpr(20)  # as codec/ans_format.py
PLACE_MASK = tl.constexpr((1 << 20) - 1)
AREA_WORDS = tl.constexpr(1024)
MOST_BLOCKS = tl.constexpr(64)  # hash blocks of a large chunk
TILE = tl.constexpr(1024)


@triton.jit
def chunk_table(payload, count):
    """The chunk table of a payload (pointer to 32-bit words): two words a chunk."""
    blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    return payload + 16 + 2 * blocks


@triton.jit
def fixed_start(count, values_per_chunk, BITMAP_WORDS: tl.constexpr):
    """See AnsShape.fixed_start."""
    blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    chunks = (count + values_per_chunk - 1) // values_per_chunk
    return (64 + (8 + 4 * BITMAP_WORDS) * blocks + 8 * chunks + 15) // 16 * 16


@triton.jit
def start_payloads(table, sizes, identity, block_size, coder_version, BITMAP_WORDS: tl.constexpr):
    """One program a segment: the header of an empty payload, zeros where parts are padded."""
    segment = tl.program_id(0)
    entry = table + segment * COLUMNS
    out = tl.load(entry + 1).to(tl.pointer_type(tl.int32))
    count = tl.load(entry + 3)
    body = tl.load(entry + 7)
    lane = tl.arange(0, 16)
    value = tl.where(lane == 0, 0x41524943, 0)
    value = tl.where(lane == 1, identity, value)
    value = tl.where(lane == 2, (count & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), value)
    value = tl.where(lane == 3, (count >> 32).to(tl.int32), value)
    value = tl.where(lane == 4, (body & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True), value)
    value = tl.where(lane == 5, (body >> 32).to(tl.int32), value)
    value = tl.where(lane == 7, block_size, value)
    value = tl.where(lane == 8, HASH_BLOCK, value)
    value = tl.where(lane == 9, coder_version, value)
    tl.store(out + lane, value)
    tl.store(sizes + segment, body)
    fixed = fixed_start(count, tl.load(entry + 6), BITMAP_WORDS)
    last = fixed // 4 - 4 + lane
    tl.store(out + last, 0, mask=(lane < 4) & (last >= 16))
    last = body // 4 - 8 + lane  # fixed parts end at most 32 bytes before the first chunk
    tl.store(out + last, 0, mask=(lane < 8) & (last >= fixed // 4))


@triton.jit
def size_chunks(
    table,
    chunk_segment,
    chunk_index,
    lengths,
    coded_bytes,
    statuses,
    escape_counts,
    totals,
    ESCAPES: tl.constexpr,
):
    """One program a chunk: its size in units of 16 bytes into ``totals``, its block table and its coded size."""
    pid = tl.program_id(0)
    entry = table + tl.load(chunk_segment + pid) * COLUMNS
    index = tl.load(chunk_index + pid)
    payload = tl.load(entry + 1).to(tl.pointer_type(tl.uint32))
    count = tl.load(entry + 3)
    length = tl.load(lengths + pid)
    coded = tl.load(coded_bytes + pid)
    uncoded = (tl.load(statuses + pid) != 0) | (coded >= length)
    stored = tl.where(uncoded, length, coded)
    total = (stored + 15) // 16
    if ESCAPES:
        blocks_per_chunk = tl.load(entry + 6) // HASH_BLOCK
        lane = tl.arange(0, MOST_BLOCKS)
        block = index * blocks_per_chunk + lane
        block_length = tl.minimum(count - block * HASH_BLOCK, HASH_BLOCK)
        there = (lane < blocks_per_chunk) & (block_length > 0)
        escapes = tl.load(escape_counts + tl.load(entry + 4) + block, mask=there, other=0)
        words = tl.where(escapes == SPLIT, (block_length.to(tl.int32) + 3) // 4, escapes)
        words = tl.where(there, words, 0)
        first = tl.cumsum(words, 0) - words
        hash_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
        tl.store(
            payload + 16 + hash_blocks + block,
            (first | (escapes << COUNT_SHIFT)).to(tl.uint32, bitcast=True),
            mask=there,
        )
        total += (tl.sum(words, 0) + 3) // 4
    tl.store(totals + pid, total)
    coded_entry = stored | (uncoded.to(tl.int64) << 31)
    tl.store(chunk_table(payload, count) + 2 * index + 1, coded_entry.to(tl.uint32))


@triton.jit
def copy_words(source, target, count, part, PARTS: tl.constexpr, padded):
    """Copy ``count`` 32-bit words and zeros up to ``padded``, this program's share of ``PARTS``."""
    lane = tl.arange(0, TILE)
    first = part * TILE
    while first < padded:
        index = first + lane
        value = tl.load(source + index, mask=index < count, other=0)
        tl.store(target + index, value, mask=index < padded)
        first += PARTS * TILE


@triton.jit
def move_chunks(
    table,
    chunk_segment,
    chunk_index,
    chunk_starts,
    symbols,
    coded,
    stride,
    escapes,
    totals,
    sizes,
    ESCAPES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """PARTS programs a chunk: its coded symbols and escapes to their places; the last chunk sets the size."""
    pid = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    segment = tl.load(chunk_segment + pid)
    entry = table + segment * COLUMNS
    index = tl.load(chunk_index + pid)
    payload = tl.load(entry + 1).to(tl.pointer_type(tl.uint32))
    count = tl.load(entry + 3)
    values_per_chunk = tl.load(entry + 6)
    body = tl.load(entry + 7)
    lane = tl.arange(0, TILE)
    before = tl.zeros([TILE], tl.int64)
    first = index * 0
    while first < index:
        before += tl.load(totals + pid - index + first + lane, mask=first + lane < index, other=0)
        first += TILE
    place = body // 16 + tl.sum(before, 0)
    chunk_entry = chunk_table(payload, count) + 2 * index
    if part == 0:
        tl.store(chunk_entry, place.to(tl.uint32))
        if (index + 1).to(tl.int64) * values_per_chunk >= count:
            size = (place + tl.load(totals + pid)) * 16
            tl.store(sizes + segment, size)
            tl.store(payload.to(tl.pointer_type(tl.int64), bitcast=True) + 2, size)

    stored_entry = tl.load(chunk_entry + 1)
    stored = (stored_entry & 0x7FFFFFFF).to(tl.int32)
    address = tl.where(
        (stored_entry >> 31) != 0, symbols + tl.load(chunk_starts + pid), coded + pid.to(tl.int64) * stride
    )
    source = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
    target = tl.multiple_of((payload.to(tl.int64) + place * 16).to(tl.pointer_type(tl.uint32)), 16)
    # Scratch may be read up to 15 bytes behind a chunk; those bytes are stored, mean nothing and are cleared.
    padded = (stored + 15) // 16 * 4
    copy_words(source, target, padded, part, PARTS, padded)
    if part == (padded - 1) // TILE % PARTS:
        tl.debug_barrier()
        tail = tl.arange(0, 16)
        as_bytes = target.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(as_bytes + stored + tail, tl.zeros([16], tl.uint8), mask=stored + tail < padded * 4)

    if ESCAPES:
        blocks_per_chunk = (values_per_chunk // HASH_BLOCK).to(tl.int32)
        hash_blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
        first_block = index * blocks_per_chunk
        num_blocks = tl.minimum(hash_blocks - first_block, blocks_per_chunk).to(tl.int32)
        global_block = tl.load(entry + 4) + first_block
        here = part
        while here < num_blocks:
            described = tl.load(payload + 16 + hash_blocks + first_block + here)
            words = (described >> COUNT_SHIFT).to(tl.int32)
            length = tl.minimum(count - (first_block + here).to(tl.int64) * HASH_BLOCK, HASH_BLOCK)
            words = tl.where(words == SPLIT, (length.to(tl.int32) + 3) // 4, words)
            start = (described & PLACE_MASK).to(tl.int32)
            end = start + words
            end = tl.where(here == num_blocks - 1, (end + 3) // 4 * 4, end)
            area = escapes.to(tl.pointer_type(tl.uint32)) + (global_block + here) * AREA_WORDS
            copy_words(area, target + padded + start, words, 0, 1, end - start)
            here += PARTS


@triton.jit
def list_inputs(
    table,
    chunk_segment,
    chunk_index,
    chunk_starts,
    capacities,
    symbols,
    spare,
    spare_bytes,
    sources,
    source_bytes,
    outs,
    room,
    symbol_places,
    uncoded_bytes,
    identity,
    block_size,
    coder_version,
):
    """One program a chunk of payloads to decode: what nvCOMP gets, clamped to the payload.

    A chunk that is uncoded or does not fit its payload is replaced by the ``spare`` one. ``uncoded_bytes``: -1
    for a coded chunk, else its symbols' bytes, 0 when nothing about it can be believed.
    """
    pid = tl.program_id(0)
    entry = table + tl.load(chunk_segment + pid) * COLUMNS
    index = tl.load(chunk_index + pid)
    address = tl.load(entry + 1)
    payload = address.to(tl.pointer_type(tl.uint32))
    num_bytes = tl.load(entry + 2)
    count = tl.load(entry + 3)
    body = tl.load(entry + 7)
    good = (num_bytes >= body) & header_is_right(
        payload, num_bytes, count, identity, block_size, coder_version
    )
    chunk_entry = chunk_table(payload, count) + 2 * index
    offset = tl.load(chunk_entry, mask=good, other=0).to(tl.int64) * 16
    stored_entry = tl.load(chunk_entry + 1, mask=good, other=0)
    stored = (stored_entry & 0x7FFFFFFF).to(tl.int64)
    good &= (stored > 0) & (offset >= body) & (offset + stored <= num_bytes)
    is_coded = good & ((stored_entry >> 31) == 0)
    scratch = symbols + tl.load(chunk_starts + pid)
    tl.store(sources + pid, tl.where(is_coded, address + offset, spare))
    tl.store(source_bytes + pid, tl.where(is_coded, stored, spare_bytes))
    tl.store(outs + pid, scratch)
    tl.store(room + pid, tl.load(capacities + pid))
    tl.store(symbol_places + pid, tl.where(is_coded, scratch, address + offset))
    tl.store(uncoded_bytes + pid, tl.where(is_coded, -1, tl.where(good, stored, 0)))


@triton.jit
def available_symbols(uncoded_bytes, decoded_bytes, statuses, capacities, chunk):
    """Symbols of a chunk that may be read after decompression."""
    uncoded = tl.load(uncoded_bytes + chunk)
    decoded = tl.minimum(tl.load(decoded_bytes + chunk), tl.load(capacities + chunk))
    return tl.where(uncoded >= 0, uncoded, tl.where(tl.load(statuses + chunk) == 0, decoded, 0))
