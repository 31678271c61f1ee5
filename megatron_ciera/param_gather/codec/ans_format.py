"""The `ans` format on a GPU: constants and sizes that the plain twin and the Triton kernels share. Bytes:
docs/codec.md.

A segment is one symbol (a byte) a value, cut into chunks that nvCOMP codes one by one. Behind a chunk's coded
symbols lie its blocks' escapes. What has a fixed size (hashes, tables, sign and mantissa) lies in front.
"""

from dataclasses import dataclass

import numpy as np

from .container import num_hash_blocks
from .words import HASH_BLOCK

SMALL_CHUNK, LARGE_CHUNK = 1 << 16, 1 << 18  # symbols a chunk
LARGE_SEGMENT = 1 << 25  # values from which on chunks are large: fewer tables of frequencies
# In place of a block's number of escapes: low bytes are symbols, high bytes stand in their place.
SPLIT = 0xFFF
COUNT_SHIFT = 20  # block table of `delta`: escapes above this bit, place of the first one below
AREA_WORDS = HASH_BLOCK // 4  # 32-bit words of escapes, or of high bytes, of one block: at most this many
UNCODED = 1 << 31  # chunk table: the symbols are stored as they are
CHUNK_ENTRY_WORDS = 3  # chunk table: place, size, checksum of the stored symbols
GOLDEN = 0x9E3779B1


def padded(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def chunk_values(num_values: int) -> int:
    """Symbols of one chunk of a segment of this many values, a multiple of HASH_BLOCK. Known to both ends."""
    return LARGE_CHUNK if num_values >= LARGE_SEGMENT else SMALL_CHUNK


def checksum(stored: np.ndarray) -> int:
    """Of a chunk's stored symbols (uint8), so that nvCOMP only sees what an encoder wrote: its length and the
    sum of 32-bit words times odd numbers, modulo 2^32."""
    words = np.pad(stored, (0, -stored.size % 4)).view("<u4")
    factors = np.arange(words.size, dtype=np.uint32) * np.uint32(GOLDEN) | np.uint32(1)
    return (int((words * factors).sum(dtype=np.uint32)) + stored.size) & 0xFFFFFFFF


def num_chunks(num_values: int) -> int:
    return -(-num_values // chunk_values(num_values))


@dataclass(frozen=True)
class AnsShape:
    """What one codec and dtype put in front of the chunks, and whether blocks have escapes."""

    bitmap_words: int  # 32-bit words of changed-block bits a hash block
    fixed_bytes: int  # bytes of fixed size a hash block of HASH_BLOCK values
    escapes: bool
    symbol_step: int = 1  # symbols come in groups of so many

    def fixed_start(self, num_values: int) -> int:
        """First byte behind header, hashes, block table, chunk table and bitmaps."""
        blocks = num_hash_blocks(num_values)
        return padded(
            64 + (8 + 4 * self.bitmap_words) * blocks + 4 * CHUNK_ENTRY_WORDS * num_chunks(num_values)
        )

    def body_start(self, num_values: int) -> int:
        """First byte of the first chunk."""
        # The last block's parts are padded to 4 bytes each, hence whole blocks but for the last one.
        whole, rest = divmod(num_values, HASH_BLOCK)
        tail = -(-rest * self.fixed_bytes // HASH_BLOCK) + 16 if rest and self.fixed_bytes else 0
        return padded(self.fixed_start(num_values) + whole * self.fixed_bytes + min(tail, self.fixed_bytes))

    def bound(self, num_values: int) -> int:
        """Bytes that any payload fits into: every chunk uncoded, every block at the most escapes."""
        chunks = num_chunks(num_values)
        symbols = -(-num_values // self.symbol_step) * self.symbol_step + 16 * chunks
        areas = num_values + 4 * num_hash_blocks(num_values) + 16 * chunks if self.escapes else 0
        # An empty chunk of symbols is stored as 16 bytes.
        return padded(self.body_start(num_values) + symbols + areas + 16)
