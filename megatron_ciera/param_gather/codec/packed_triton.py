"""`delta` with the `packed` coder as Triton kernels, for NVIDIA and AMD. Twin: packed_delta.py."""

from collections.abc import Sequence

import numpy as np
import torch

from ..kernels.delta_packed_decode import decode_blocks
from ..kernels.delta_packed_encode import encode_blocks
from .container import CODEC_IDS, CODER_IDS, VERSION
from .packed_delta import PackedDelta
from .packed_format import body_start
from .plans import Blocks, Kept, is_aligned, list_blocks, to_device
from .words import HASH_FACTORS, LANE_FACTORS, position_factors


def check_outs(codec, words: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    for new, out in zip(words, outs, strict=True):
        if out.numel() < codec.bound(new.numel()):
            raise ValueError(
                f"encode: out has {out.numel()} bytes, wanted bound() = {codec.bound(new.numel())}"
            )


def aligned_words(words: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors themselves, or copies of those that do not start at a multiple of 16 bytes."""
    return [segment if is_aligned([segment]) else segment.clone() for segment in words]


class TritonPlans:
    """What a codec of kernels keeps: block lists for the lengths seen, and constants in device memory."""

    # Launch options measured on an H200 (docs/results); the register cap is NVIDIA's.
    encode_options = {"num_warps": 4, "maxnreg": 128}
    decode_options = {"num_warps": 4, "maxnreg": 128}
    hip_warps = 4

    def prepare(self) -> None:
        if torch.version.hip:
            self.encode_options = self.decode_options = {"num_warps": self.hip_warps}
        self.kept_blocks = Kept()
        self.multipliers = torch.from_numpy(position_factors(self.fmt).view(np.int32)).to(self.device)
        self.identity = (
            VERSION | CODEC_IDS[self.name] << 8 | CODER_IDS[self.coder_name] << 16 | self.fmt.dtype_id << 24
        )

    def blocks(self, words: Sequence[torch.Tensor]) -> Blocks:
        counts = tuple(segment.numel() for segment in words)
        return self.kept_blocks.get(counts, lambda: list_blocks(counts, self.device))

    def encode_table(self, words, states, outs) -> tuple[Blocks, torch.Tensor]:
        """Blocks, and int64 [segments, 5] = (new words, state, out, values, cursor)."""
        rows = [
            (new.data_ptr(), state.data_ptr(), out.data_ptr(), new.numel(), body_start(new.numel()) // 4)
            for new, state, out in zip(words, states, outs, strict=True)
        ]
        return self.blocks(words), to_device(np.array(rows, np.int64), self.device)

    def decode_table(self, payloads, words) -> tuple[Blocks, torch.Tensor]:
        """Blocks, and int64 [payloads, 4] = (payload, its bytes, words, values)."""
        rows = [
            (payload.data_ptr(), payload.numel(), target.data_ptr(), target.numel())
            for payload, target in zip(payloads, words, strict=True)
        ]
        return self.blocks(words), to_device(np.array(rows, np.int64), self.device)


class PackedDeltaTriton(TritonPlans, PackedDelta):
    """One launch an encode and one a decode, whatever the number of segments.

    Every call uploads a small table of addresses, asynchronously from pinned memory; lists of blocks are kept
    for the lengths seen. Blocks lie in a payload in the order in which they were finished, so payload bytes
    may differ from run to run; what they decode to does not.
    """

    encode_options = {"num_warps": 2, "maxnreg": 168}  # a thread a lane
    decode_options = {"num_warps": 2, "maxnreg": 128}
    hip_warps = 1

    def __init__(self, dtype, block_size, device):
        super().__init__(dtype, block_size, device)
        self.prepare()
        self.lane_factors = torch.from_numpy(LANE_FACTORS.view(np.int32)).to(self.device)
        self.word_factors = torch.from_numpy(HASH_FACTORS.view(np.int32)).to(self.device)
        self.constants = dict(
            WORD32=self.shape.halves,
            CHUNK=self.shape.chunk,
            MAX_WIDTH=self.shape.max_width,
            SHIFT=self.shape.exponent_shift,
            MASK=self.shape.exponent_mask,
        )

    def encode_many(self, words, states, outs, sizes):
        if not words:
            return
        check_outs(self, words, outs)
        # The kernels read words of 4 bytes: segments that start elsewhere are copied (asynchronously) first.
        words, states = aligned_words(words), aligned_words(states)
        blocks, table = self.encode_table(words, states, outs)
        self.launch(encode_blocks, blocks.every, table, sizes, self.encode_options)

    def decode_apply_many(self, payloads, words, flags):
        if not words:
            return
        targets, words = words, aligned_words(words)
        blocks, table = self.decode_table(payloads, words)
        self.launch(decode_blocks, blocks.every, table, flags, self.decode_options)
        for target, decoded in zip(targets, words, strict=True):
            if target is not decoded:
                target.copy_(decoded)

    def launch(self, kernel, blocks, table: torch.Tensor, result: torch.Tensor, options: dict) -> None:
        kernel[(len(blocks),)](
            table,
            blocks.segment,
            blocks.index,
            result,
            self.lane_factors,
            self.word_factors,
            self.identity,
            self.block_size,
            **self.constants,
            **options,
        )
