"""`delta` with the `packed` coder as Triton kernels, for NVIDIA and AMD. Twin: packed_reference.py."""

from collections.abc import Sequence

import numpy as np
import torch

from ..kernels.delta_packed_decode import decode_blocks
from ..kernels.delta_packed_encode import choose_centres, encode_blocks, write_totals
from .container import CODEC_IDS, CODER_IDS, VERSION
from .packed_delta import PackedDelta
from .packed_format import NUM_GAPS, NUM_SCALES, REGION_BLOCKS, SAMPLE_LANES, SAMPLE_RUNS
from .plans import Blocks, Kept, is_aligned, list_blocks, to_device
from .words import HASH_BLOCK, HASH_MULTIPLIERS


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

    def prepare(self) -> None:
        if torch.version.hip:
            self.encode_options = {"num_warps": self.encode_options["num_warps"]}
            self.decode_options = {"num_warps": self.decode_options["num_warps"]}
        self.kept_blocks = Kept()
        self.multipliers = torch.from_numpy(HASH_MULTIPLIERS.view(np.int32)).to(self.device)
        self.identity = (
            VERSION | CODEC_IDS[self.name] << 8 | CODER_IDS[self.coder_name] << 16 | self.fmt.dtype_id << 24
        )

    def blocks(self, words: Sequence[torch.Tensor]) -> Blocks:
        counts = tuple(segment.numel() for segment in words)
        return self.kept_blocks.get(
            counts, lambda: list_blocks(counts, REGION_BLOCKS * HASH_BLOCK, self.device)
        )

    def encode_table(self, words, states, outs) -> tuple[Blocks, torch.Tensor]:
        """Blocks, and int64 [segments, 5] = (new words, state, out, values, first region)."""
        blocks = self.blocks(words)
        rows = [
            (new.data_ptr(), state.data_ptr(), out.data_ptr(), new.numel(), first)
            for new, state, out, first in zip(words, states, outs, blocks.first_region.tolist(), strict=True)
        ]
        return blocks, to_device(np.array(rows, np.int64), self.device)

    def decode_table(self, payloads, words) -> tuple[Blocks, torch.Tensor]:
        """Blocks, and int64 [payloads, 4] = (payload, its bytes, words, values)."""
        rows = [
            (payload.data_ptr(), payload.numel(), target.data_ptr(), target.numel())
            for payload, target in zip(payloads, words, strict=True)
        ]
        return self.blocks(words), to_device(np.array(rows, np.int64), self.device)


class PackedDeltaTriton(TritonPlans, PackedDelta):
    """Three to four launches an encode, one or two a decode, whatever the number of segments.

    Every call uploads a small table of addresses, asynchronously from pinned memory; lists of blocks are kept
    for the lengths seen. Blocks lie in a payload in the order in which they were finished, so payload bytes
    may differ from run to run; what they decode to does not.
    """

    def __init__(self, dtype, block_size, device):
        if dtype is torch.float32 and device.type != "cpu":
            # Its escapes were wrong on an H200; what is in the kernel now ran in the interpreter only.
            raise ValueError(
                "codec delta with coder packed on a GPU: dtype torch.float32, wanted torch.bfloat16 or "
                "torch.float16; use --ciera-coder ans or --ciera-codec exponent-reuse for fp32 parameters"
            )
        super().__init__(dtype, block_size, device)
        self.prepare()
        self.widths_of_format = dict(
            WORD32=self.shape.halves,
            MAX_A=self.shape.max_a,
            MAX_B=self.shape.max_b,
            EXPONENT_SHIFT=self.shape.exponent_shift,
            EXPONENT_MASK=self.shape.exponent_mask,
        )

    def encode_many(self, words, states, outs, sizes):
        if not words:
            return
        check_outs(self, words, outs)
        # The kernels read vectors of 16 bytes: words that start elsewhere are copied (asynchronously) first.
        words, states = aligned_words(words), aligned_words(states)
        blocks, table = self.encode_table(words, states, outs)
        num_regions = blocks.region_segment.numel()
        centres = torch.empty(num_regions, dtype=torch.int32, device=self.device)
        choose_centres[(num_regions,)](
            table,
            blocks.region_segment,
            centres,
            sizes,
            self.identity,
            self.block_size,
            **self.widths_of_format,
            REGION=REGION_BLOCKS * HASH_BLOCK,
            RUNS=SAMPLE_RUNS,
            LANES=SAMPLE_LANES,
            SCALES=NUM_SCALES,
            GAPS=NUM_GAPS,
            num_warps=8,
        )
        for part, full in ((blocks.whole, True), (blocks.tails, False)):
            if len(part):
                encode_blocks[(len(part),)](
                    table,
                    part.segment,
                    part.index,
                    centres,
                    sizes,
                    self.multipliers,
                    **self.widths_of_format,
                    CHUNK=self.shape.chunk,
                    REGION_BLOCKS=REGION_BLOCKS,
                    FULL=full,
                    ALIGNED=True,
                    **self.encode_options,
                )
        write_totals[(len(words),)](table, sizes, num_warps=1)

    def decode_apply_many(self, payloads, words, flags):
        if not words:
            return
        targets, words = words, aligned_words(words)
        blocks, table = self.decode_table(payloads, words)
        for part, full in ((blocks.whole, True), (blocks.tails, False)):
            if len(part):
                decode_blocks[(len(part),)](
                    table,
                    part.segment,
                    part.index,
                    flags,
                    self.multipliers,
                    self.identity,
                    self.block_size,
                    **self.widths_of_format,
                    CHUNK=self.shape.chunk,
                    FULL=full,
                    ALIGNED=True,
                    **self.decode_options,
                )
        for target, decoded in zip(targets, words, strict=True):
            if target is not decoded:
                target.copy_(decoded)
