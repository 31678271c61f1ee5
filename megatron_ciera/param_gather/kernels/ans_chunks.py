"""Around nvCOMP: headers, places of chunks, moving them together, and what the decoder gives to nvCOMP.
Format: docs/codec.md.

Table: int64 [segments, COLUMNS] = (words, payload, state or payload's bytes, values, first block, first
chunk, values a chunk, first byte of the chunks). Blocks and chunks are counted over all segments of a call.
"""

import triton
import triton.language as tl

from .bits import HASH_BLOCK, wrapping_sum
from .delta_packed_decode import header_is_right

COLUMNS = tl.constexpr(8)
SPLIT, COUNT_SHIFT = tl.constexpr(0xFFF), tl.constexpr(20)  # as codec/ans_format.py
PLACE_MASK = tl.constexpr((1 << 20) - 1)
AREA_WORDS = tl.constexpr(1024)
MOST_BLOCKS = tl.constexpr(64)  # hash blocks of a large chunk
TILE = tl.constexpr(1024)


@triton.jit
def chunk_table(payload, count):
    """The chunk table of a payload (pointer to 32-bit words), three words a chunk: place in units of 16
    bytes, bytes of stored symbols (bit 31: uncoded), checksum of them."""
    blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    return payload + 16 + 2 * blocks


@triton.jit
def fixed_start(count, values_per_chunk, BITMAP_WORDS: tl.constexpr):
    """See AnsShape.fixed_start."""
    blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    chunks = (count + values_per_chunk - 1) // values_per_chunk
    return (64 + (8 + 4 * BITMAP_WORDS) * blocks + 12 * chunks + 15) // 16 * 16


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
    """One program a chunk: its size in units of 16 bytes into ``totals``, its tables but for its place."""
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
    chunk_entry = chunk_table(payload, count) + 3 * index
    tl.store(chunk_entry + 1, coded_entry.to(tl.uint32))
    tl.store(chunk_entry + 2, stored.to(tl.uint32))  # move_chunks adds the words


@triton.jit
def checksum_factors(index):
    """Odd factors of words, uint32: see ans_format.checksum."""
    return (index.to(tl.uint32) * 0x9E3779B1) | 1


@triton.jit
def copy_words(source, target, count, padded):
    """Copy ``count`` 32-bit words, and zeros up to ``padded``."""
    lane = tl.arange(0, 128)
    first = padded * 0
    while first < padded:
        index = first + lane
        value = tl.load(source + index, mask=index < count, other=0)
        tl.store(target + index, value, mask=index < padded)
        first += 128


@triton.jit
def copy_symbols(source, target, num_bytes, part, PARTS: tl.constexpr):
    """This program's share of copying ``num_bytes``, with zeros up to a multiple of 16; returns its part of
    their checksum. Reads up to 15 bytes behind the source."""
    lane = tl.arange(0, TILE)
    padded = (num_bytes + 15) // 16 * 4
    summed = tl.zeros([TILE], tl.int32)
    first = part * TILE
    while first < padded:
        index = first + lane
        value = tl.load(source + index, mask=index < padded, other=0)
        beyond = tl.minimum(tl.maximum((index + 1) * 4 - num_bytes, 0), 4)  # bytes behind the last symbol
        value = tl.where(beyond == 4, 0, value & (0xFFFFFFFF >> (8 * tl.minimum(beyond, 3)).to(tl.uint32)))
        tl.store(target + index, value, mask=index < padded)
        summed += (value * checksum_factors(index)).to(tl.int32, bitcast=True)
        first += PARTS * TILE
    return wrapping_sum(summed)


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
    chunk_entry = chunk_table(payload, count) + 3 * index
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
    padded = (stored + 15) // 16 * 4
    if part * TILE < padded:
        summed = copy_symbols(source, target, stored, part, PARTS)
        tl.atomic_add(chunk_entry.to(tl.pointer_type(tl.int32), bitcast=True) + 2, summed, sem="relaxed")

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
            copy_words(area, target + padded + start, words, end - start)
            here += PARTS


@triton.jit
def find_chunk(payload, num_bytes, count, body, index, identity, block_size, coder_version):
    """(whether a chunk lies inside its payload, its first byte, its size entry); nothing outside is read."""
    good = (num_bytes >= body) & header_is_right(
        payload, num_bytes, count, identity, block_size, coder_version
    )
    chunk_entry = chunk_table(payload, count) + 3 * index
    offset = tl.load(chunk_entry, mask=good, other=0).to(tl.int64) * 16
    stored_entry = tl.load(chunk_entry + 1, mask=good, other=0)
    stored = (stored_entry & 0x7FFFFFFF).to(tl.int64)
    good &= (stored > 0) & (stored <= MOST_BLOCKS * HASH_BLOCK)
    good &= (offset >= body) & (offset + stored <= num_bytes)
    return good, offset, stored_entry


@triton.jit
def sum_chunks(
    table,
    chunk_segment,
    chunk_index,
    checksums,
    identity,
    block_size,
    coder_version,
    PARTS: tl.constexpr,
):
    """PARTS programs a chunk: the sum of its stored words times their factors, added to ``checksums``."""
    pid = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    entry = table + tl.load(chunk_segment + pid) * COLUMNS
    address = tl.load(entry + 1)
    good, offset, stored_entry = find_chunk(
        address.to(tl.pointer_type(tl.uint32)),
        tl.load(entry + 2),
        tl.load(entry + 3),
        tl.load(entry + 7),
        tl.load(chunk_index + pid),
        identity,
        block_size,
        coder_version,
    )
    stored = tl.where(good, stored_entry & 0x7FFFFFFF, 0).to(tl.int32)
    source = tl.multiple_of((address + offset).to(tl.pointer_type(tl.uint32)), 16)
    lane = tl.arange(0, TILE)
    summed = tl.zeros([TILE], tl.int32)
    whole = stored // 4
    first = part * TILE
    while first < whole:
        index = first + lane
        value = tl.load(source + index, mask=index < whole, other=0)
        summed += (value * checksum_factors(index)).to(tl.int32, bitcast=True)
        first += PARTS * TILE
    total = wrapping_sum(summed)
    if part == 0:
        tail = tl.arange(0, 4)
        as_bytes = source.to(tl.pointer_type(tl.uint8), bitcast=True) + whole * 4
        rest = tl.load(as_bytes + tail, mask=whole * 4 + tail < stored, other=0).to(tl.int32)
        last = tl.sum(rest << (8 * tail), 0)
        total += (last.to(tl.uint32, bitcast=True) * checksum_factors(whole)).to(tl.int32, bitcast=True)
    tl.atomic_add(checksums + pid, total, sem="relaxed")


@triton.jit
def list_inputs(
    table,
    chunk_segment,
    chunk_index,
    chunk_starts,
    capacities,
    checksums,
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

    A chunk that is uncoded, does not fit its payload or whose checksum (in ``checksums``) is wrong is
    replaced by the ``spare`` one. ``uncoded_bytes``: -1 for a coded chunk, else its symbols' bytes, 0 when
    nothing about it can be believed.
    """
    pid = tl.program_id(0)
    entry = table + tl.load(chunk_segment + pid) * COLUMNS
    index = tl.load(chunk_index + pid)
    address = tl.load(entry + 1)
    payload = address.to(tl.pointer_type(tl.uint32))
    num_bytes = tl.load(entry + 2)
    count = tl.load(entry + 3)
    body = tl.load(entry + 7)
    good, offset, stored_entry = find_chunk(
        payload, num_bytes, count, body, index, identity, block_size, coder_version
    )
    stored = (stored_entry & 0x7FFFFFFF).to(tl.int64)
    wanted = tl.load(chunk_table(payload, count) + 3 * index + 2, mask=good, other=0)
    good &= wanted.to(tl.int32, bitcast=True) == tl.load(checksums + pid) + stored.to(tl.int32)
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
