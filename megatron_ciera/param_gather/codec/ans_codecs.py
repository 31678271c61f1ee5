"""`delta` and `exponent-reuse` with the `ans` coder on NVIDIA: what `make_codec` makes."""

from ..kernels.ans_delta import apply_symbols, encode_symbols
from ..kernels.ans_exponents import encode_changed, merge_exponents
from ..kernels.exponents_packed import hash_exponents
from .ans_format import AnsShape
from .ans_gpu import AnsOnGpu
from .container import num_hash_blocks
from .nvcomp_library import NvcompAns
from .packed_delta import PackedDelta
from .packed_exponents import PackedExponentReuse
from .words import HASH_BLOCK


def delta_shape(fmt) -> AnsShape:
    """fp32: the lower halves stand in front of the chunks."""
    return AnsShape(0, 2 * HASH_BLOCK if fmt.itemsize == 4 else 0, True)


def exponent_shape(fmt, block_size: int) -> AnsShape:
    """Sign and mantissa of 8, 11 or 24 bits a value in front of the chunks, and bits of changed blocks."""
    return AnsShape(
        max(HASH_BLOCK // block_size // 32, 1), HASH_BLOCK * fmt.rest_bits // 8, False, block_size
    )


class AnsDelta(AnsOnGpu, PackedDelta):
    """State: a shadow, the words as last gathered."""

    def __init__(self, dtype, block_size, device, library=None):
        super().__init__(dtype, block_size, device)
        self.ans_shape = delta_shape(self.fmt)
        self.format = dict(WORD32=self.fmt.itemsize == 4)
        self.prepare(library or NvcompAns())

    def encode_values(self, plan, table, symbols, escapes, escape_counts):
        """Symbols, escapes and hashes of every block; returns the symbols of every chunk, int64 [chunks]."""
        self.launch(
            encode_symbols,
            plan,
            table,
            symbols.data_ptr(),
            escapes.data_ptr(),
            escape_counts,
            self.multipliers,
        )
        return plan.lengths

    def apply_values(self, plan, table, flags, chunks):
        self.apply_with(apply_symbols, plan, table, flags, chunks)


class AnsExponentReuse(AnsOnGpu, PackedExponentReuse):
    """State: int64 [num_blocks, 2], the bits of the 128-bit exponent hash of each exponent block."""

    launch_options = {"num_warps": 4, "maxnreg": 64}  # measured on an H200 (docs/results)

    def __init__(self, dtype, block_size, device, library=None):
        super().__init__(dtype, block_size, device)
        self.ans_shape = exponent_shape(self.fmt, block_size)
        self.hash_format = dict(
            WORD32=self.fmt.itemsize == 4,
            SHIFT=self.fmt.exponent_shift,
            MASK=(1 << self.fmt.exponent_bits) - 1,
            BLOCK=block_size,
        )
        self.format = self.hash_format | dict(
            BITMAP_WORDS=self.ans_shape.bitmap_words, FIXED_BYTES=self.ans_shape.fixed_bytes
        )
        self.prepare(library or NvcompAns())

    def update_state(self, words, state):
        if words.numel():
            grid = (num_hash_blocks(words.numel()),)
            hash_exponents[grid](words, state, words.numel(), **self.hash_format, num_warps=4)

    def encode_values(self, plan, table, symbols, escapes, escape_counts):
        """As AnsDelta's; chunks of unchanged blocks keep one exponent block's worth of symbols."""
        chunk_bytes = self.counts_of_chunks(plan)
        self.launch(encode_changed, plan, table, symbols.data_ptr(), chunk_bytes, self.multipliers)
        return chunk_bytes.clamp_(min=16)

    def apply_values(self, plan, table, flags, chunks):
        self.apply_with(merge_exponents, plan, table, flags, chunks)
