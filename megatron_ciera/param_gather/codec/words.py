"""Words, exponents and hashes: the bit-level vocabulary that every codec shares.

A *word* is the bit pattern of one parameter, held as int16 (bf16, fp16) or int32 (fp32). Functions here take
and return numpy arrays of unsigned words, allocate their results, and never look at a word as a number with
rounding.
"""

from dataclasses import dataclass

import numpy as np
import torch

HASH_BLOCK = 4096  # values covered by one verification hash
HASH_LANES, HASH_ROW_FACTOR = 64, 0x9E3779B1
_SPLITMIX_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # two independent streams: digits of pi


@dataclass(frozen=True)
class WordFormat:
    """Layout of one floating-point format. ``exponent_shift`` is the number of mantissa bits."""

    dtype_id: int
    torch_dtype: torch.dtype
    word_dtype: torch.dtype
    numpy_dtype: type
    exponent_bits: int
    exponent_shift: int

    @property
    def itemsize(self) -> int:
        return self.word_dtype.itemsize

    @property
    def bits(self) -> int:
        return 8 * self.itemsize

    @property
    def rest_bits(self) -> int:
        """Sign and mantissa bits of one word."""
        return self.bits - self.exponent_bits


FORMATS = {
    torch.bfloat16: WordFormat(1, torch.bfloat16, torch.int16, np.uint16, 8, 7),
    torch.float16: WordFormat(2, torch.float16, torch.int16, np.uint16, 5, 10),
    torch.float32: WordFormat(3, torch.float32, torch.int32, np.uint32, 8, 23),
}


def word_format(dtype: torch.dtype) -> WordFormat:
    """The format of a parameter dtype. ValueError for anything but bf16, fp16 and fp32."""
    if dtype not in FORMATS:
        raise ValueError(
            f"codec dtype {dtype}: wanted torch.bfloat16, torch.float16 or torch.float32; "
            "leave other parameters uncompressed"
        )
    return FORMATS[dtype]


def as_words(values: torch.Tensor) -> torch.Tensor:
    """The words of a contiguous parameter tensor, as a flat view (no copy)."""
    return values.detach().view(-1).view(word_format(values.dtype).word_dtype)


def ordered_code(words: np.ndarray) -> np.ndarray:
    """Order-preserving bijection of 16-bit words onto int16 codes: -0 is -1, +0 is 0, NaN payloads keep their
    place.

    A negative word has its magnitude bits inverted, so consecutive codes are neighbouring values. Own inverse
    (see :func:`words_of_code`).
    """
    signed = words.view(np.int16)
    return signed ^ ((signed >> 15) & np.int16(0x7FFF))


def words_of_code(code: np.ndarray) -> np.ndarray:
    """Inverse of :func:`ordered_code`: int16 codes to uint16 words."""
    return (code ^ ((code >> 15) & np.int16(0x7FFF))).view(np.uint16)


def exponents(words: np.ndarray, fmt: WordFormat) -> np.ndarray:
    """Exponent field of every word as uint8."""
    mask = (1 << fmt.exponent_bits) - 1
    return ((words >> words.dtype.type(fmt.exponent_shift)) & words.dtype.type(mask)).astype(np.uint8)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64 finaliser (Steele, Lea, Flood 2014) of uint64 values, wrapping."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def exponent_hashes(exponent: np.ndarray, block_size: int) -> np.ndarray:
    """128-bit hash of every block of exponent bytes: uint64 [num_blocks, 2], two independent SplitMix64
    streams.

    Stream s of a block is the wrapping sum over its 8-byte little-endian words w_p, p = 0, 1, … of
    splitmix64((w_p xor seed_s) + (p + 1) · golden). The last block is padded with zero bytes.
    """
    num_blocks = -(-exponent.size // block_size)
    row_bytes = -(-block_size // 8) * 8
    padded = np.zeros((num_blocks, row_bytes), np.uint8)
    if block_size == row_bytes:
        padded.reshape(-1)[: exponent.size] = exponent
    else:
        rows = np.zeros(num_blocks * block_size, np.uint8)
        rows[: exponent.size] = exponent
        padded[:, :block_size] = rows.reshape(num_blocks, block_size)
    lanes = padded.view("<u8")
    position = np.arange(1, lanes.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    streams = [
        splitmix64((lanes ^ np.uint64(seed)) + position).sum(axis=1, dtype=np.uint64)
        for seed in _SPLITMIX_SEEDS
    ]
    return np.stack(streams, axis=1)


def _lane_factors() -> np.ndarray:
    index = np.arange(1, HASH_LANES + 1, dtype=np.uint64)
    mixed = splitmix64(index * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


def _hash_factors() -> np.ndarray:
    rows = [pow(HASH_ROW_FACTOR, row + 1, 2**32) for row in range(HASH_BLOCK // HASH_LANES)]
    quads = np.array(rows, np.uint32).reshape(-1, 1, 4)
    return (quads * LANE_FACTORS[:, None]).reshape(-1)


LANE_FACTORS = _lane_factors()  # odd
# Odd, of 32-bit word 4 · (q · HASH_LANES + t) + j of a hash block: LANE_FACTORS[t] · HASH_ROW_FACTOR^(4q + j + 1).
HASH_FACTORS = _hash_factors()


def position_factors(fmt: WordFormat) -> np.ndarray:
    """What each word of a hash block is multiplied with: uint32 [HASH_BLOCK]. Two 16-bit words are one
    32-bit word, the first one its low half."""
    if fmt.itemsize == 4:
        return HASH_FACTORS
    low = HASH_FACTORS[: HASH_BLOCK // 2]
    return np.stack([low, low << np.uint32(16)], axis=1).reshape(-1)


def block_hashes(words: np.ndarray) -> np.ndarray:
    """Verification hash of every HASH_BLOCK words (uint16 or uint32): uint32 [num_blocks], the wrapping sum of
    the block's 32-bit words times their factors; a last odd 16-bit word is padded with zero.

    Factors are odd, so one wrong word always shows; several wrong words escape with probability about 2^-32.
    """
    full = words.size // HASH_BLOCK
    result = np.empty(-(-words.size // HASH_BLOCK), np.uint32)
    if full:
        whole = words[: full * HASH_BLOCK]
        if whole.ctypes.data % 4:
            whole = whole.copy()
        rows = whole.view(np.uint32).reshape(full, -1)
        for first in range(0, full, 16):  # 16 blocks at a time stay in cache
            part = rows[first : first + 16]
            result[first : first + len(part)] = np.einsum("ij,j->i", part, HASH_FACTORS[: rows.shape[1]])
    if full < result.size:
        tail = words[full * HASH_BLOCK :]
        tail = np.concatenate([tail, np.zeros(tail.size % 2, tail.dtype)]).view(np.uint32)
        result[full] = (tail * HASH_FACTORS[: tail.size]).sum(dtype=np.uint32)
    return result
