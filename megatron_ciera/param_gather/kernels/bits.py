"""Device functions that the kernels share: sums, ordered codes, counting bits."""

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
def bit_length(z):
    """Bits of a non-negative int32 below 2^24: the exponent of its float."""
    exponent = (z.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(z > 0, exponent, 0)


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
