"""Device functions that the kernels share: ordered codes, widths, packing and finding bits.

Shapes: R rows of 8 values, each row K chunks of 8 / K values, whose codes take at most 32 bits. Values are
handled as [R, K, 8 / K] tensors, made from [R, 8] ones by a reshape that leaves every value in its thread.
"""

import triton
import triton.language as tl

HASH_BLOCK = tl.constexpr(4096)  # as codec/words.py


@triton.jit
def wrapping_sum(values):
    """Sum of an int32 vector modulo 2^32 as int32. Summed in 64 bits, as the interpreter does not wrap."""
    return tl.sum(values.to(tl.int64), 0).to(tl.int32)


@triton.jit
def upper_half(words, WORD32: tl.constexpr):
    """The 16-bit words that are coded, sign-extended to int32: the words themselves, or fp32's upper
    halves."""
    half = words.to(tl.int32)
    if WORD32:
        half = half >> 16
    return half


@triton.jit
def signed_code(half):
    """Ordered code of a sign-extended 16-bit word; its own inverse."""
    return half ^ ((half >> 31) & 0x7FFF)


@triton.jit
def zigzag(new_half, old_half):
    difference = signed_code(new_half) - signed_code(old_half)
    return (difference << 1) ^ (difference >> 31)


@triton.jit
def apply_zigzag(z, old_half):
    """The new 16-bit word, sign-extended (beyond 16 bits only for codes that no encoder writes)."""
    return signed_code(signed_code(old_half) + ((z >> 1) ^ -(z & 1)))


@triton.jit
def clip_width(centre, exponent, MAX_WIDTH: tl.constexpr):
    return tl.minimum(tl.maximum(centre - exponent, 0), MAX_WIDTH)


@triton.jit
def bit_length(z):
    """Bits of a non-negative int32 below 2^24: the exponent of its float."""
    exponent = (z.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(z > 0, exponent, 0)


@triton.jit
def split_chunks(x, CHUNKS: tl.constexpr):
    """The columns of an [R, K] tensor, K = 2 or 4, as a tuple of [R] tensors."""
    if CHUNKS == 2:
        return tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def merge_words(done_a, key_a, open_a, done_b, key_b, open_b):
    """Combine two runs of rows of a bit stream (left before right); key = 4 · first word of the last row +
    words it finishes. ``open`` is the unfinished word behind a run, ``done`` the word that its last row
    starts in.
    """
    end_a = (key_a >> 2) + (key_a & 3)
    end_b = (key_b >> 2) + (key_b & 3)
    done = done_b | tl.where(end_a == (key_b >> 2), open_a, 0)
    unfinished = open_b | tl.where(end_a == end_b, open_a, 0)
    return done, key_b, unfinished


@triton.jit
def store_bit_stream(
    base, chunks, chunk_bits, bit_start, total_bits, CHUNKS: tl.constexpr, ROWS: tl.constexpr
):
    """Write rows of chunks (tuples of uint32 [R] and their numbers of bits, at most 32) as one stream of
    bits.

    A row stores the words that it finishes alone; the first word it finishes may hold bits of earlier rows,
    which a scan brings along, and what is left at the end is stored by the last row.
    """
    row = tl.arange(0, ROWS)
    first_word = bit_start >> 5
    place = bit_start & 31
    finished = place * 0
    unfinished = chunks[0] & 0
    first_done = unfinished
    for k in tl.static_range(CHUNKS):
        shift = place.to(tl.uint32)
        unfinished |= chunks[k] << shift
        place += chunk_bits[k]
        crosses = place >= 32
        if k > 0:
            tl.store(base + first_word + finished, unfinished, mask=crosses & (finished > 0))
        first_done = tl.where(crosses & (finished == 0), unfinished, first_done)
        unfinished = tl.where(crosses, (chunks[k] >> 1) >> (31 - shift), unfinished)
        finished += place >> 5
        place &= 31
    key = first_word * 4 + finished
    done, key, unfinished = tl.associative_scan((first_done, key, unfinished), axis=0, combine_fn=merge_words)
    tl.store(base + first_word, done, mask=finished > 0)
    tl.store(base + first_word + finished, unfinished, mask=(row == ROWS - 1) & ((total_bits & 31) != 0))


@triton.jit
def load_bit_window(base, bit_start, there):
    """The 32 bits from ``bit_start`` on (uint32 [R]); reads one word beyond the one that holds the first
    bit."""
    word = base + (bit_start >> 5)
    shift = (bit_start & 31).to(tl.uint32)
    low = tl.load(word, mask=there, other=0)
    high = tl.load(word + 1, mask=there, other=0)
    return (low >> shift) | ((high << 1) << (31 - shift))


@triton.jit
def row_ranks(bits, ROWS: tl.constexpr):
    """Where the set bits of rows of 8 stand among all set bits: (int32 [R] set bits in earlier rows, int32
    [R, 8] set bits at lower columns of the same row).

    ``bits``: int32 [R], bit c for column c. Counted by arithmetic: no scan runs along a row, whose
    columns may lie in several threads.
    """
    before = tl.cumsum(count_bits(bits), 0) - count_bits(bits)
    lower = (1 << tl.arange(0, 8)[None, :]) - 1
    return before, count_bits(bits[:, None] & lower)


@triton.jit
def count_bits(bits):
    """Set bits of integers below 256."""
    bits = bits - ((bits >> 1) & 0x55)
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    return (bits + (bits >> 4)) & 15
