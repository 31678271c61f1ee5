"""`exponent-reuse` with the `packed` coder as Triton kernels, for NVIDIA and AMD. Twin:
packed_exponents.py."""

from ..kernels.exponents_packed import decode_exponents, encode_exponents, hash_exponents, start_payloads
from .container import num_hash_blocks
from .packed_exponents import PackedExponentReuse
from .packed_triton import TritonPlans, aligned_words, check_outs


class PackedExponentReuseTriton(TritonPlans, PackedExponentReuse):
    """Three to four launches an encode, one or two a decode, whatever the number of segments; one a state
    update."""

    def __init__(self, dtype, block_size, device):
        super().__init__(dtype, block_size, device)
        self.prepare()
        self.format = dict(
            WORD32=self.fmt.itemsize == 4,
            SHIFT=self.fmt.exponent_shift,
            MASK=(1 << self.fmt.exponent_bits) - 1,
            BLOCK=block_size,
        )

    def update_state(self, words, state):
        if words.numel():
            grid = (num_hash_blocks(words.numel()),)
            hash_exponents[grid](words, state, words.numel(), **self.format, num_warps=4)

    def encode_many(self, words, states, outs, sizes):
        if not words:
            return
        check_outs(self, words, outs)
        words = aligned_words(words)
        blocks, table = self.encode_table(words, states, outs)
        start_payloads[(len(words),)](table, sizes, self.identity, self.block_size, num_warps=1)
        for part, full in ((blocks.whole, True), (blocks.tails, False)):
            if len(part):
                encode_exponents[(len(part),)](
                    table,
                    part.segment,
                    part.index,
                    sizes,
                    self.multipliers,
                    **self.format,
                    FULL=full,
                    ALIGNED=True,
                    **self.encode_options,
                )

    def decode_apply_many(self, payloads, words, flags):
        if not words:
            return
        targets, words = words, aligned_words(words)
        blocks, table = self.decode_table(payloads, words)
        for part, full in ((blocks.whole, True), (blocks.tails, False)):
            if len(part):
                decode_exponents[(len(part),)](
                    table,
                    part.segment,
                    part.index,
                    flags,
                    self.multipliers,
                    self.identity,
                    self.block_size,
                    **self.format,
                    FULL=full,
                    ALIGNED=True,
                    **self.decode_options,
                )
        for target, decoded in zip(targets, words, strict=True):
            if target is not decoded:
                target.copy_(decoded)
