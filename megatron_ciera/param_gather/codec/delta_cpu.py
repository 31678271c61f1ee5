"""`delta` on CPU: entropy-coded differences of order-preserving codes, each coded by the exponent of its old
word.

The old exponent says how large a step of the last place is against the weight update, so every old exponent
gets its own stream (`streams.py`). fp32 words are two halves: the upper one is a bf16 word and coded like
one, the lower one is sent as its xor with the old half. Body bytes: docs/codec.md.
"""

import struct

import numpy as np
import torch

from .cpu_codec import CpuCodec
from .streams import ESCAPE, BodyReader, StreamError, read_bytes, read_symbols, write_bytes, write_symbols
from .words import FORMATS, WordFormat, exponents, ordered_code, words_of_code

NUM_CONTEXTS = 10
_TOP_SHARE = 0.01  # exponents above the top context hold less than this share of a chunk's values


def upper_half(words: np.ndarray, fmt: WordFormat) -> tuple[np.ndarray, WordFormat]:
    """The 16-bit words to difference: the words themselves, or the upper halves of fp32 words, which are
    bf16."""
    if fmt.itemsize == 2:
        return words, fmt
    return (words >> np.uint32(16)).astype(np.uint16), FORMATS[torch.bfloat16]


def top_exponent(exponent: np.ndarray) -> int:
    """The exponent of context 0, from every 16th value: only the sender needs it, so a sample does."""
    counts = np.bincount(exponent[::16], minlength=256)
    above = counts[::-1].cumsum()[::-1]
    return int(np.flatnonzero(above >= _TOP_SHARE * above[0])[-1])


def context_order(exponent: np.ndarray, top: int) -> tuple[np.ndarray, list[int]]:
    """Stable order of values by context, and the number of values of each of the NUM_CONTEXTS contexts."""
    context = np.maximum(np.uint8(top), exponent) - exponent
    np.minimum(context, np.uint8(NUM_CONTEXTS - 1), out=context)
    counts = [np.count_nonzero(context == index) for index in range(NUM_CONTEXTS)]
    return np.argsort(context, kind="stable"), counts


class DeltaCpu(CpuCodec):
    """State: a shadow, the words as last gathered. `ans` coder."""

    name, coder_name = "delta", "ans"

    def state_bytes(self, num_values):
        return num_values * self.fmt.itemsize

    def new_state(self, words):
        return words.clone()

    def update_state(self, words, state):
        state.copy_(words)

    def encode_body(self, words, state):
        shadow = state.view(self.fmt.numpy_dtype)
        chunks = [
            self._encode_chunk(
                words[first : first + self.chunk_values], shadow[first : first + self.chunk_values]
            )
            for first in range(0, words.size, self.chunk_values)
        ]
        body = np.array([len(chunk) for chunk in chunks], "<u4").tobytes() + b"".join(chunks)
        return np.frombuffer(body, np.uint8), ()

    def _encode_chunk(self, words: np.ndarray, shadow: np.ndarray) -> bytes:
        new, fmt = upper_half(words, self.fmt)
        old, _ = upper_half(shadow, self.fmt)
        difference = ordered_code(new) - ordered_code(old)  # wraps modulo 2^16, and so does the decoder's sum
        escaped = (difference + np.int16(127)).view(np.uint16) > 254
        symbols = difference.astype(np.int8)
        symbols[escaped] = ESCAPE
        exponent = exponents(old, fmt)
        top = top_exponent(exponent)
        order, counts = context_order(exponent, top)
        symbols = symbols.take(order)
        positions = np.flatnonzero(escaped)
        parts = [
            struct.pack("<BI", top, positions.size),
            positions.astype("<u4").tobytes(),
            new[positions].tobytes(),
        ]
        start = 0
        for count in counts:
            parts.append(write_symbols(symbols[start : start + count]))
            start += count
        if self.fmt.itemsize == 4:
            parts += [write_bytes(half) for half in _byte_planes(words ^ shadow)]
        return b"".join(parts)

    def decode_body(self, body, extra, base):
        starts = range(0, base.size, self.chunk_values)
        reader = BodyReader(body)
        try:
            sizes = reader.array(len(starts), "<u4")
        except StreamError:
            return
        for first, size in zip(starts, sizes, strict=True):
            try:
                part = BodyReader(reader.take(int(size)))
                new = self._decode_chunk(part, base[first : first + self.chunk_values])
            except StreamError:
                continue
            yield first, new

    def _decode_chunk(self, reader: BodyReader, base: np.ndarray) -> np.ndarray:
        old, fmt = upper_half(base, self.fmt)
        top, num_escaped = reader.unpack("<BI")
        positions = reader.array(num_escaped, "<u4")
        values = reader.array(num_escaped, "<u2")
        order, counts = context_order(exponents(old, fmt), top)
        symbols = np.empty(old.size, np.int8)
        start = 0
        for count in counts:
            symbols[order[start : start + count]] = read_symbols(reader, int(count))
            start += count
        new = words_of_code(ordered_code(old) + symbols)
        if positions.size:
            if int(positions.max()) >= old.size:
                raise StreamError("an escape lies outside its chunk")
            new[positions] = values
        if self.fmt.itemsize == 2:
            return new
        low = read_bytes(reader, old.size).astype(np.uint32)
        low |= read_bytes(reader, old.size).astype(np.uint32) << np.uint32(8)
        return (new.astype(np.uint32) << np.uint32(16)) | ((base ^ low) & np.uint32(0xFFFF))


def _byte_planes(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two low bytes of every 32-bit word."""
    return words.astype(np.uint8), (words >> np.uint32(8)).astype(np.uint8)
