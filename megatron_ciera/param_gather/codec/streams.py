"""Entropy-coded byte streams on CPU: Zstandard's literal coder (Huffman with FSE-coded tables), through
`zstandard`.

A *stream* is a run of small integers with one statistic. Streams of int8 symbols that rarely leave [-7, 7]
are stored as nibble pairs before coding: a prefix code cannot spend less than one bit on a byte, so a byte
then carries two.
"""

import struct
import threading

import numpy as np
import zstandard

ESCAPE = -128  # int8 symbol: the value is elsewhere
_NIBBLE_ESCAPE = 8  # nibble: the symbol is in the stream of wide symbols
_PAIR_SHARE = 0.01  # nibble pairs pay as long as no more than this share of symbols is wide

# A tiny match finder: the input is close to independent symbols, where matches cost more bits than literals.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, window_log=17, hash_log=6, write_content_size=1
)

_OF_THREAD = threading.local()


def _coder(kind: str):
    """This thread's 'compressor' or 'decompressor': making one takes as long as coding a kilobyte."""
    if not hasattr(_OF_THREAD, kind):
        _OF_THREAD.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        _OF_THREAD.decompressor = zstandard.ZstdDecompressor()
    return getattr(_OF_THREAD, kind)


class BodyReader:
    """Bounds-checked reading of a body: ``StreamError`` where it ends early."""

    def __init__(self, body: np.ndarray):
        self.body, self.position = body, 0

    def take(self, num_bytes: int) -> np.ndarray:
        end = self.position + num_bytes
        if num_bytes < 0 or end > self.body.size:
            raise StreamError("body ends early")
        part = self.body[self.position : end]
        self.position = end
        return part

    def unpack(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)).tobytes())

    def array(self, count: int, dtype: str) -> np.ndarray:
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize).tobytes(), dtype)


class StreamError(ValueError):
    """A stream that does not decode to the number of symbols asked for."""


def write_bytes(values: np.ndarray) -> bytes:
    """A length-prefixed coded stream of bytes (uint8 or int8): u32 coded bytes, then a Zstandard frame."""
    frame = _coder("compressor").compress(values.tobytes())
    return struct.pack("<I", len(frame)) + frame


def read_bytes(reader: BodyReader, count: int) -> np.ndarray:
    """Inverse of :func:`write_bytes`; StreamError unless the frame holds exactly ``count`` bytes."""
    (size,) = reader.unpack("<I")
    frame = reader.take(size).tobytes()
    try:
        if zstandard.frame_content_size(frame) != count:
            raise StreamError("stream has another length")
        return np.frombuffer(_coder("decompressor").decompress(frame), np.uint8)
    except zstandard.ZstdError as error:
        raise StreamError(str(error)) from error


def write_symbols(symbols: np.ndarray) -> bytes:
    """A stream of int8 symbols: u8 kind (0 bytes, 1 nibble pairs), then its byte streams."""
    wide = (symbols.view(np.uint8) + np.uint8(7)) > 14
    num_wide = np.count_nonzero(wide)
    if num_wide > _PAIR_SHARE * symbols.size:
        return b"\0" + write_bytes(symbols)
    nibbles = np.zeros(symbols.size + symbols.size % 2, np.uint8)
    np.bitwise_and(symbols.view(np.uint8), np.uint8(15), out=nibbles[: symbols.size])
    nibbles[: symbols.size][wide] = _NIBBLE_ESCAPE
    two = nibbles.view("<u2")
    pairs = (two | (two >> np.uint16(4))).astype(np.uint8)
    return b"\1" + struct.pack("<I", num_wide) + write_bytes(pairs) + write_bytes(symbols[wide])


def read_symbols(reader: BodyReader, count: int) -> np.ndarray:
    """Inverse of :func:`write_symbols`: int8 [count]."""
    (kind,) = reader.unpack("<B")
    if kind == 0:
        return read_bytes(reader, count).view(np.int8)
    (num_wide,) = reader.unpack("<I")
    pairs = read_bytes(reader, -(-count // 2)).astype("<u2")
    extra = read_bytes(reader, num_wide).view(np.int8)
    nibbles = ((pairs & np.uint16(15)) | ((pairs << np.uint16(4)) & np.uint16(0x0F00))).view(np.uint8)[:count]
    symbols = (nibbles.view(np.int8) ^ np.int8(8)) - np.int8(8)
    where = np.flatnonzero(nibbles == _NIBBLE_ESCAPE)
    if where.size != num_wide:
        raise StreamError("wide symbols and their places disagree")
    symbols[where] = extra
    return symbols
