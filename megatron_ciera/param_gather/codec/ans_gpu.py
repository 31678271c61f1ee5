"""Both codecs with the `ans` coder on NVIDIA: Triton kernels around nvCOMP. Twin: ans_reference.py.

A call takes a number of launches that does not depend on the number of segments. Scratch (about 3 bytes a
value to encode, 1 to decode) comes from torch's allocator for the current stream and goes back to it at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.ans_chunks import (
    list_inputs,
    move_chunks,
    size_chunks,
    start_payloads,
    sum_chunks,
)
from .ans_format import chunk_values, num_chunks
from .container import CODEC_IDS, CODER_IDS, VERSION, num_hash_blocks
from .packed_triton import aligned_words, check_outs
from .plans import Blocks, Kept, list_blocks, to_device
from .words import HASH_BLOCK, position_factors

_PARTS = 16  # programs that move one chunk
_SPARE_BYTES = 4096


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of one call, and where segments start among blocks and chunks."""

    blocks: Blocks
    segment: torch.Tensor  # int32 [chunks]
    index: torch.Tensor  # int32 [chunks]: in the segment
    starts: torch.Tensor  # int64 [chunks]: first symbol's byte in the scratch of symbols
    lengths: torch.Tensor  # int64 [chunks]: values
    capacities: torch.Tensor  # int64 [chunks]: bytes in the scratch of symbols
    numbers: torch.Tensor  # int64 [chunks]: 0, 1, 2 …
    first_block: np.ndarray  # int64 [segments]
    first_chunk: np.ndarray
    num_blocks: int
    chunk_bytes: int  # symbols of the largest chunk

    @property
    def num_chunks(self) -> int:
        return self.segment.numel()

    @property
    def symbol_bytes(self) -> int:
        return self.num_blocks * HASH_BLOCK


def list_chunks(counts: Sequence[int], device: torch.device) -> ChunkPlan:
    blocks = np.array([num_hash_blocks(count) for count in counts], np.int64)
    chunks = np.array([num_chunks(count) for count in counts], np.int64)
    size = np.array([chunk_values(count) for count in counts], np.int64)
    first_block, first_chunk = np.cumsum(blocks) - blocks, np.cumsum(chunks) - chunks
    segment = np.repeat(np.arange(len(counts)), chunks)
    index = np.arange(segment.size) - first_chunk[segment]
    inside = index * size[segment]
    lengths = np.minimum(np.array(counts, np.int64)[segment] - inside, size[segment])
    capacities = -(-lengths // HASH_BLOCK) * HASH_BLOCK
    starts = first_block[segment] * HASH_BLOCK + inside
    wide = to_device(np.stack([starts, lengths, capacities, np.arange(segment.size)]), device)
    narrow = to_device(np.stack([segment, index]).astype(np.int32), device)
    return ChunkPlan(
        list_blocks(counts, device),
        *narrow.unbind(),
        *wide.unbind(),
        first_block,
        first_chunk,
        int(blocks.sum()),
        int(capacities.max(initial=0)),
    )


class AnsOnGpu:
    """Encoding and decoding around a batched coder of bytes; subclasses launch the passes over values."""

    coder_name = "ans"
    launch_options = {"num_warps": 4}

    def prepare(self, library) -> None:
        """``library``: a batched coder, see NvcompAns."""
        self.library, self.coder_version = library, library.version
        self.kept_plans = Kept()
        self.multipliers = torch.from_numpy(position_factors(self.fmt).view(np.int32)).to(self.device)
        self.identity = (
            VERSION | CODEC_IDS[self.name] << 8 | CODER_IDS["nvcomp"] << 16 | self.fmt.dtype_id << 24
        )
        self.make_spare()

    def make_spare(self) -> None:
        """A coded chunk that stands in for chunks that nvCOMP must not read."""
        source = torch.zeros(_SPARE_BYTES, dtype=torch.uint8, device=self.device)
        bound = self.library.coded_bound(_SPARE_BYTES)
        self.spare = torch.zeros(bound, dtype=torch.uint8, device=self.device)
        addresses = to_device(
            np.array([[source.data_ptr()], [self.spare.data_ptr()], [_SPARE_BYTES]], np.int64), self.device
        )
        self.spare_bytes = torch.zeros(1, dtype=torch.int64, device=self.device)
        status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.library.compress(
            addresses[0], addresses[2], _SPARE_BYTES, _SPARE_BYTES, addresses[1], self.spare_bytes, status
        )
        if int(status) or not 0 < int(self.spare_bytes) <= bound:
            raise ValueError(
                f"coder 'ans' on cuda: nvCOMP's first chunk failed with status {int(status)}; "
                "use --ciera-coder packed"
            )
        self.spare_bytes = int(self.spare_bytes)

    def bound(self, num_values):
        return self.ans_shape.bound(num_values)

    def plan(self, words: Sequence[torch.Tensor]) -> ChunkPlan:
        counts = tuple(segment.numel() for segment in words)
        return self.kept_plans.get(counts, lambda: list_chunks(counts, self.device))

    def table(self, plan: ChunkPlan, words, payloads, third: Sequence[int]) -> torch.Tensor:
        """The kernels' int64 [segments, 8], see kernels/ans_chunks.py."""
        rows = [
            (
                segment.data_ptr(),
                payload.data_ptr(),
                value,
                segment.numel(),
                plan.first_block[index],
                plan.first_chunk[index],
                chunk_values(segment.numel()),
                self.ans_shape.body_start(segment.numel()),
            )
            for index, (segment, payload, value) in enumerate(zip(words, payloads, third, strict=True))
        ]
        return to_device(np.array(rows, np.int64), self.device)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def counts_of_chunks(self, plan: ChunkPlan, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(plan.num_chunks, dtype=dtype, device=self.device)

    def encode_many(self, words, states, outs, sizes):
        if not words:
            return
        check_outs(self, words, outs)
        words, states = aligned_words(words), aligned_words(states)
        plan = self.plan(words)
        table = self.table(plan, words, outs, [state.data_ptr() for state in states])
        start_payloads[(len(words),)](
            table,
            sizes,
            self.identity,
            self.block_size,
            self.coder_version,
            BITMAP_WORDS=self.ans_shape.bitmap_words,
            num_warps=1,
        )
        if not plan.num_chunks:
            return
        symbols = self.scratch(plan.symbol_bytes)
        escapes = self.scratch(plan.symbol_bytes if self.ans_shape.escapes else 16)
        escape_counts = torch.empty(plan.num_blocks, dtype=torch.int32, device=self.device)
        lengths = self.encode_values(plan, table, symbols, escapes, escape_counts)

        stride = -(-self.library.coded_bound(plan.chunk_bytes) // 16) * 16
        coded = self.scratch(stride * plan.num_chunks)
        coded_bytes, statuses = self.counts_of_chunks(plan), self.counts_of_chunks(plan, torch.int32)
        self.library.compress(
            plan.starts + symbols.data_ptr(),
            lengths,
            plan.chunk_bytes,
            plan.symbol_bytes,
            plan.numbers * stride + coded.data_ptr(),
            coded_bytes,
            statuses,
        )
        totals = self.counts_of_chunks(plan)
        size_chunks[(plan.num_chunks,)](
            table,
            plan.segment,
            plan.index,
            lengths,
            coded_bytes,
            statuses,
            escape_counts,
            totals,
            ESCAPES=self.ans_shape.escapes,
            num_warps=1,
        )
        move_chunks[(plan.num_chunks * _PARTS,)](
            table,
            plan.segment,
            plan.index,
            plan.starts,
            symbols.data_ptr(),
            coded.data_ptr(),
            stride,
            escapes.data_ptr(),
            totals,
            sizes,
            ESCAPES=self.ans_shape.escapes,
            PARTS=_PARTS,
            num_warps=8,
        )

    def decode_apply_many(self, payloads, words, flags):
        if not words:
            return
        targets, words = words, aligned_words(words)
        plan = self.plan(words)
        if not plan.num_chunks:
            return
        table = self.table(plan, words, payloads, [payload.numel() for payload in payloads])
        symbols = self.scratch(plan.symbol_bytes)
        sources, source_bytes, outs, room, places, uncoded, decoded = torch.zeros(
            7, plan.num_chunks, dtype=torch.int64, device=self.device
        ).unbind()
        statuses = self.counts_of_chunks(plan, torch.int32)
        checksums = self.counts_of_chunks(plan, torch.int32)
        sum_chunks[(plan.num_chunks * _PARTS,)](
            table,
            plan.segment,
            plan.index,
            checksums,
            self.identity,
            self.block_size,
            self.coder_version,
            PARTS=_PARTS,
            num_warps=8,
        )
        list_inputs[(plan.num_chunks,)](
            table,
            plan.segment,
            plan.index,
            plan.starts,
            plan.capacities,
            checksums,
            symbols.data_ptr(),
            self.spare.data_ptr(),
            self.spare_bytes,
            sources,
            source_bytes,
            outs,
            room,
            places,
            uncoded,
            self.identity,
            self.block_size,
            self.coder_version,
            num_warps=1,
        )
        self.library.decompress(
            sources, source_bytes, plan.chunk_bytes, plan.symbol_bytes, outs, room, decoded, statuses
        )
        self.apply_values(plan, table, flags, (places, uncoded, decoded, statuses, plan.capacities))
        for target, result in zip(targets, words, strict=True):
            if target is not result:
                target.copy_(result)

    def launch(self, kernel, plan: ChunkPlan, table: torch.Tensor, *arguments) -> None:
        """Run a kernel of one program a hash block, whole blocks and tails apart."""
        for part, full in ((plan.blocks.whole, True), (plan.blocks.tails, False)):
            if len(part):
                kernel[(len(part),)](
                    table,
                    part.segment,
                    part.index,
                    *arguments,
                    **self.format,
                    FULL=full,
                    **self.launch_options,
                )

    def apply_with(self, kernel, plan: ChunkPlan, table, flags, chunks) -> None:
        self.launch(
            kernel,
            plan,
            table,
            flags,
            *chunks,
            self.multipliers,
            self.identity,
            self.block_size,
            self.coder_version,
        )
