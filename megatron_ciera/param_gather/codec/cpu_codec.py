"""What both CPU codecs share: loops over segments, raw mode, and the check of every hash block before it is
stored."""

from abc import abstractmethod

import numpy as np
import torch

from .base import Codec
from .container import (
    MODE_RAW,
    PayloadError,
    PayloadLayout,
    num_hash_blocks,
    payload_body,
    payload_hashes,
    read_header,
    write_payload,
)
from .words import HASH_BLOCK, block_hashes


def flag_bad_blocks(flag: torch.Tensor, bad: np.ndarray) -> None:
    """Report the indices of bad hash blocks in one row of flags."""
    if bad.size:
        flag[0] += bad.size
        flag[1] = min(int(flag[1]), int(bad[0]))


class CpuCodec(Codec):
    """Subclasses turn words and base into a body and back; a body covers the segment in *chunks*.

    ``chunk_values`` values (a multiple of HASH_BLOCK) are decoded on their own, so damage stays inside a
    chunk.
    """

    chunk_values = 1 << 17

    @property
    def layout(self) -> PayloadLayout:
        return PayloadLayout(self.name, self.coder_name, self.fmt, self.block_size)

    @abstractmethod
    def encode_body(self, words: np.ndarray, state: np.ndarray) -> tuple[np.ndarray | None, tuple[int, ...]]:
        """Body bytes (uint8) and header extras for a non-empty segment, or None where raw mode is the better
        choice."""

    @abstractmethod
    def decode_body(self, body: np.ndarray, extra: np.ndarray, base: np.ndarray):
        """Yield ``(first, new words)`` for each chunk that parses; chunks left out count as damaged."""

    def encode_many(self, words, states, outs, sizes):
        for index, (segment, state, out) in enumerate(zip(words, states, outs, strict=True)):
            new = segment.numpy().view(self.fmt.numpy_dtype)
            if out.numel() < self.bound(new.size):
                raise ValueError(
                    f"encode: out has {out.numel()} bytes, wanted bound() = {self.bound(new.size)}"
                )
            body, extra = self.encode_body(new, state.numpy()) if new.size else (None, ())
            sizes[index] = write_payload(out.numpy(), self.layout, new, body, extra)

    def decode_apply_many(self, payloads, words, flags):
        for payload, segment, flag in zip(payloads, words, flags, strict=True):
            self._decode_one(payload.numpy(), segment.numpy().view(self.fmt.numpy_dtype), flag)

    def _decode_one(self, payload: np.ndarray, target: np.ndarray, flag: torch.Tensor) -> None:
        try:
            header = read_header(payload, self.layout, target.size)
        except PayloadError:
            flag_bad_blocks(flag, np.arange(num_hash_blocks(target.size)))
            return
        body = payload_body(payload, header, target.size)
        wanted = payload_hashes(payload, target.size)
        good = np.zeros(wanted.size, bool)
        chunks = (
            self._raw_chunks(body)
            if header["mode"] == MODE_RAW
            else self.decode_body(body, header["extra"], target)
        )
        for first, new in chunks:
            new = new[: target.size - first]
            blocks = np.arange(first // HASH_BLOCK, first // HASH_BLOCK + num_hash_blocks(new.size))
            matches = block_hashes(new) == wanted[blocks]
            good[blocks] = matches
            if matches.all():
                target[first : first + new.size] = new
                continue
            for block in blocks[matches]:
                start = block * HASH_BLOCK
                target[start : start + HASH_BLOCK] = new[start - first : start - first + HASH_BLOCK]
        flag_bad_blocks(flag, np.flatnonzero(~good))

    def _raw_chunks(self, body: np.ndarray):
        itemsize = self.fmt.itemsize
        words = body[: body.size // itemsize * itemsize].view(self.fmt.numpy_dtype)
        for first in range(0, words.size, self.chunk_values):
            yield first, words[first : first + self.chunk_values]
