"""What the kernels of `delta` with `packed` share: lanes, hashes, scalars of a block. Format: docs/codec.md.

A block of HASH_BLOCK values is handled by LANES lanes. Quad q of lane t is four 32-bit words of the block from
4 · (q · LANES + t) on. A *pair* is 32 bits: two 16-bit words, the first one in the low half, or the upper
halves of two fp32 words. Every lane codes its values by itself, with nothing between lanes but a prefix sum of
sizes and a sum of hashes.
"""

import triton
import triton.language as tl

from .bits import HASH_BLOCK

LANES = tl.constexpr(64)  # as codec/words.py HASH_LANES
VALUES = tl.constexpr(64)  # of a lane, eight a group
ROW_FACTOR = tl.constexpr(0x9E3779B1)  # as codec/words.py
RAW_MODE, SAME_MODE = tl.constexpr(0xFFFF), tl.constexpr(0xFFFE)
POSITION_BITS = tl.constexpr(12)
TAIL_WORDS = tl.constexpr(24)  # as packed_format.TAIL_BYTES
STEP = tl.constexpr(256)  # words at a time where they are not coded


@triton.jit
def body_start(count):
    """See packed_format.body_start."""
    blocks = (count + HASH_BLOCK - 1) // HASH_BLOCK
    return (64 + 12 * blocks + 15) // 16 * 16


@triton.jit
def row_factor(ROW: tl.constexpr):
    """Factor of row ROW in the hash: ROW_FACTOR^(ROW + 1) modulo 2^32, as a signed constant."""
    POWER: tl.constexpr = (ROW_FACTOR ** (ROW + 1) + 0x80000000) % 0x100000000 - 0x80000000
    return POWER


@triton.jit
def flag_bit(INDEX: tl.constexpr):
    """1 << INDEX as a signed 32-bit constant."""
    BIT: tl.constexpr = (2**INDEX + 0x80000000) % 0x100000000 - 0x80000000
    return BIT


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
def quad_places(lane, QUAD: tl.constexpr):
    return lane[:, None] * 4 + tl.arange(0, 4)[None, :] + QUAD * LANES * 4


@triton.jit
def load_quad(words, lane, QUAD: tl.constexpr):
    """The four words of quad QUAD of every lane, int32 [LANES] each. ``words``: int32 pointer to the block."""
    even, odd = tl.split(tl.reshape(tl.load(words + quad_places(lane, QUAD)), [LANES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def store_quad(words, lane, QUAD: tl.constexpr, first, second, third, fourth, mask):
    quad = tl.reshape(tl.join(tl.join(first, third), tl.join(second, fourth)), [LANES, 4])
    tl.store(words + quad_places(lane, QUAD), quad, mask=mask)


@triton.jit
def hash_quad(QUAD: tl.constexpr, first, second, third, fourth):
    """The part of every lane's hash that quad QUAD makes."""
    return (
        first * row_factor(4 * QUAD)
        + second * row_factor(4 * QUAD + 1)
        + third * row_factor(4 * QUAD + 2)
        + fourth * row_factor(4 * QUAD + 3)
    )


@triton.jit
def upper_pair(first, second):
    return ((first >> 16) & 0xFFFF) | (second & -65536)


@triton.jit
def lower_pair(first, second):
    return (first & 0xFFFF) | (second << 16)


@triton.jit
def load_pairs(words, lane, GROUP: tl.constexpr, WORD32: tl.constexpr):
    """The four pairs of group GROUP of every lane, then its part of the hash, then the four pairs of fp32's
    lower halves: int32 [LANES] each. 16-bit words have no lower halves, their pairs come twice."""
    if WORD32:
        a, b, c, d = load_quad(words, lane, 2 * GROUP)
        e, f, g, h = load_quad(words, lane, 2 * GROUP + 1)
        part = hash_quad(2 * GROUP, a, b, c, d) + hash_quad(2 * GROUP + 1, e, f, g, h)
        u0, u1, u2, u3 = upper_pair(a, b), upper_pair(c, d), upper_pair(e, f), upper_pair(g, h)
        return u0, u1, u2, u3, part, lower_pair(a, b), lower_pair(c, d), lower_pair(e, f), lower_pair(g, h)
    else:
        a, b, c, d = load_quad(words, lane, GROUP)
        return a, b, c, d, hash_quad(GROUP, a, b, c, d), a, b, c, d


@triton.jit
def exponent_of(pair, HALF: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr):
    return (pair >> (SHIFT + 16 * HALF)) & MASK


@triton.jit
def value_position(value, lane, WORD32: tl.constexpr):
    """Position in the block of a lane's value number ``value``."""
    if WORD32:
        return (value >> 2) * (4 * LANES) + 4 * lane + (value & 3)
    else:
        return (value >> 3) * (8 * LANES) + 8 * lane + (value & 7)


@triton.jit
def position_factor(word_factors, position, there, WORD32: tl.constexpr):
    """What the word at a position is multiplied with in the hash."""
    if WORD32:
        return tl.load(word_factors + position, mask=there, other=0)
    else:
        return tl.load(word_factors + (position >> 1), mask=there, other=0) << (16 * (position & 1))


@triton.jit
def combine_lanes(size0, hash0, changed0, escapes0, size1, hash1, changed1, escapes1):
    return size0 + size1, hash0 + hash1, changed0 | changed1, tl.maximum(escapes0, escapes1)


@triton.jit
def count_bits32(x):
    """Set bits of int32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return (x + (x >> 16)) & 63


@triton.jit
def lowest_bit_index(x):
    """Index of the lowest set bit of a non-zero int32."""
    low = x & -x
    return ((low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127
