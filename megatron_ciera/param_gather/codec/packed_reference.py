"""The slow clear twin of the `packed` kernels, in plain torch: same bytes, and the CPU path of the coder.

Here: what both codecs share, a payload of independently coded blocks. Blocks lie in order; the kernels may
place them in any order, which the descriptors allow.
"""

from abc import abstractmethod

import numpy as np
import torch

from .base import Codec
from .container import (
    CODEC_IDS,
    CODER_IDS,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MODE_CODED,
    VERSION,
    PayloadError,
    PayloadLayout,
    num_hash_blocks,
    payload_hashes,
    read_header,
)
from .cpu_codec import flag_bad_blocks
from .packed_format import DESCRIPTOR_BYTES, NUM_ESCAPES_RAW, TAIL_BYTES, body_start, packed_bound
from .words import HASH_BLOCK, block_hashes


class PackedReference(Codec):
    """Subclasses code one block of at most HASH_BLOCK values; bytes of a block are a multiple of 4."""

    coder_name = "packed"

    def __init__(self, dtype, block_size, device):
        super().__init__(dtype, block_size, device)
        self.layout = PayloadLayout(self.name, self.coder_name, self.fmt, block_size)

    def bound(self, num_values):
        return packed_bound(num_values, self.fmt)

    @abstractmethod
    def encode_blocks(self, new: torch.Tensor, state: torch.Tensor):
        """Yield ``(bytes, second descriptor word)`` for each hash block of a segment; no bytes ask for raw
        mode."""

    @abstractmethod
    def decode_block(self, coded: np.ndarray, descriptor: int, old: torch.Tensor) -> torch.Tensor | None:
        """The new words of one coded block, or None when its bytes are not all there."""

    def encode_many(self, words, states, outs, sizes):
        for index, (new, state, out) in enumerate(zip(words, states, outs, strict=True)):
            if out.numel() < self.bound(new.numel()):
                raise ValueError(
                    f"encode: out has {out.numel()} bytes, wanted bound() = {self.bound(new.numel())}"
                )
            sizes[index] = self._encode_one(new, state, out.numpy())

    def _encode_one(self, new: torch.Tensor, state: torch.Tensor, out: np.ndarray) -> int:
        count, offset = new.numel(), body_start(new.numel())
        descriptors = np.zeros((num_hash_blocks(count), 2), "<u4")
        for block, (coded, descriptor) in enumerate(self.encode_blocks(new, state)):
            raw = new[block * HASH_BLOCK : (block + 1) * HASH_BLOCK].numpy().view(np.uint8)
            if coded.size >= raw.size:
                coded = np.concatenate([raw, np.zeros(-raw.size % 4, np.uint8)])
                descriptor = descriptor & ~0xFFFF | NUM_ESCAPES_RAW
            descriptors[block] = offset // 4, descriptor
            out[offset : offset + coded.size] = coded
            offset += coded.size
        out[offset : offset + TAIL_BYTES] = 0
        total = offset + TAIL_BYTES
        header = np.zeros(1, HEADER)
        header["magic"], header["version"], header["mode"] = MAGIC, VERSION, MODE_CODED
        header["codec"], header["coder"] = CODEC_IDS[self.name], CODER_IDS[self.coder_name]
        header["dtype"], header["block_size"], header["hash_block"] = (
            self.fmt.dtype_id,
            self.block_size,
            HASH_BLOCK,
        )
        header["num_values"], header["total_bytes"] = count, total
        hashes = block_hashes(new.numpy().view(self.fmt.numpy_dtype)).astype("<u4")
        front = np.concatenate(
            [header.view(np.uint8), hashes.view(np.uint8), descriptors.reshape(-1).view(np.uint8)]
        )
        out[: front.size] = front
        out[front.size : body_start(count)] = 0
        return total

    def decode_apply_many(self, payloads, words, flags):
        for payload, target, flag in zip(payloads, words, flags, strict=True):
            self._decode_one(payload.numpy(), target, flag)

    def _decode_one(self, payload: np.ndarray, target: torch.Tensor, flag: torch.Tensor) -> None:
        count = target.numel()
        num_blocks = num_hash_blocks(count)
        try:
            read_header(payload, self.layout, count)
            if payload.size < body_start(count):
                raise PayloadError("payload is shorter than its block descriptors")
        except PayloadError:
            flag_bad_blocks(flag, np.arange(num_blocks))
            return
        hashes = payload_hashes(payload, count)
        start = HEADER_BYTES + 4 * num_blocks
        descriptors = payload[start : start + DESCRIPTOR_BYTES * num_blocks].view("<u4").reshape(-1, 2)
        bad = []
        for block in range(num_blocks):
            part = target[block * HASH_BLOCK : (block + 1) * HASH_BLOCK]
            new = self._decode_block(
                payload[int(descriptors[block, 0]) * 4 :], int(descriptors[block, 1]), part
            )
            if new is None or block_hashes(new.numpy().view(self.fmt.numpy_dtype))[0] != hashes[block]:
                bad.append(block)
            else:
                part.copy_(new)
        flag_bad_blocks(flag, np.array(bad, np.int64))

    def _decode_block(self, coded: np.ndarray, descriptor: int, old: torch.Tensor) -> torch.Tensor | None:
        if descriptor & 0xFFFF != NUM_ESCAPES_RAW:
            return self.decode_block(coded, descriptor, old)
        raw = coded[: old.numel() * self.fmt.itemsize]
        return (
            torch.from_numpy(raw.copy()).view(old.dtype)
            if raw.size == old.numel() * self.fmt.itemsize
            else None
        )
