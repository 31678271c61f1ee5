"""Runs the passes around nvCOMP in Triton's interpreter on CPU, with Zstandard where nvCOMP stands on a GPU.

A process of its own, since the interpreter is chosen by an environment variable before Triton is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import ctypes  # noqa: E402
import sys  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import zstandard  # noqa: E402
from codec_cases import damaged, patterns, round_trip, to_words, training_pair  # noqa: E402
from interpreted import report  # noqa: E402

from megatron_ciera.param_gather.codec import HASH_BLOCK, new_flags  # noqa: E402
from megatron_ciera.param_gather.codec.ans_codecs import AnsDelta, AnsExponentReuse  # noqa: E402
from megatron_ciera.param_gather.codec.ans_reference import (  # noqa: E402
    AnsDeltaReference,
    AnsExponentReuseReference,
)

KERNELS = {"delta": AnsDelta, "exponent-reuse": AnsExponentReuse}
TWINS = {"delta": AnsDeltaReference, "exponent-reuse": AnsExponentReuseReference}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CPU = torch.device("cpu")
_TABLE_BYTES = 1001


def compress(data: bytes) -> bytes:
    """Not smaller for small chunks, as nvCOMP's tables cost about a kilobyte."""
    return zstandard.ZstdCompressor().compress(data) + bytes(_TABLE_BYTES)


def decompress(data: bytes) -> bytes | None:
    try:
        return zstandard.ZstdDecompressor().decompress(data[:-_TABLE_BYTES], max_output_size=1 << 20)
    except zstandard.ZstdError:
        return None


class ZstandardInMemory:
    """The batched interface of NvcompAns on host addresses; checks what nvCOMP asks of its caller.

    Like nvCOMP it must never see bytes that no encoder wrote: such a chunk fails the test.
    """

    version = 6000

    def coded_bound(self, chunk_bytes):
        return chunk_bytes + 2048

    def compress(self, sources, source_bytes, chunk_bytes, total_bytes, outs, out_bytes, statuses):
        assert int(source_bytes.sum()) <= total_bytes and int(source_bytes.min()) > 0
        for index in range(sources.numel()):
            source, size, out = int(sources[index]), int(source_bytes[index]), int(outs[index])
            assert source % 16 == 0 and out % 16 == 0 and size <= chunk_bytes
            coded = compress(ctypes.string_at(source, size))
            assert len(coded) <= self.coded_bound(chunk_bytes)
            ctypes.memmove(out, coded, len(coded))
            out_bytes[index], statuses[index] = len(coded), 0

    def decompress(self, sources, source_bytes, chunk_bytes, total_bytes, outs, room, out_bytes, statuses):
        for index in range(sources.numel()):
            source, out = int(sources[index]), int(outs[index])
            assert source % 16 == 0 and out % 16 == 0
            data = decompress(ctypes.string_at(source, int(source_bytes[index])))
            assert data is not None and len(data) <= int(room[index]), "a damaged chunk reached the coder"
            ctypes.memmove(out, data, len(data))
            out_bytes[index], statuses[index] = len(data), 0


def pair_of_codecs(name: str, dtype: torch.dtype):
    return (
        KERNELS[name](dtype, 512, CPU, ZstandardInMemory()),
        TWINS[name](dtype, 512, CPU, compress, decompress, ZstandardInMemory.version),
    )


def compare(name: str, dtype: torch.dtype) -> None:
    kernels, twin = pair_of_codecs(name, dtype)
    for size, cases in (
        (0, ("training",)),
        (1, ("noise",)),
        (600, ("training with specials", "noise")),
        (4097, ("training with specials", "unchanged")),
        (9001, ("hot step",)),
    ):
        for case in cases:
            old, new = patterns(size, dtype)[case]
            got, wanted = round_trip(kernels, old, new), round_trip(twin, old, new)
            if got.size != wanted.size:
                raise SystemExit(f"{name} {dtype} {size} {case}: {got.size} bytes, twin {wanted.size}")
            if name == "delta" and not np.array_equal(got, wanted):
                raise SystemExit(f"{name} {dtype} {size} {case}: kernel and twin wrote different bytes")
            target, flags = to_words(old), new_flags(1, CPU)
            twin.decode_apply(torch.from_numpy(got), target, flags)  # exponents lie in any order
            if flags[0, 0] or not torch.equal(target, to_words(new)):
                raise SystemExit(f"{name} {dtype} {size} {case}: the twin cannot read the kernel's payload")


def damage(name: str) -> None:
    kernels, _ = pair_of_codecs(name, torch.bfloat16)
    old, new = patterns(4000, torch.bfloat16)["training with specials"]
    for payload in damaged(round_trip(kernels, old, new), count=16):
        target, flags = to_words(old), new_flags(1, CPU)
        kernels.decode_apply(torch.from_numpy(payload), target, flags)
        kept = flags.tolist() == [[1, 0]] and torch.equal(target, to_words(old))
        unharmed = flags[0, 0] == 0 and torch.equal(target, to_words(new))
        if not kept and not unharmed:
            raise SystemExit(f"{name}: a damaged payload went unnoticed: {flags.tolist()}")


def segments(name: str) -> None:
    """Several segments in one call, one of them of two chunks, equal one by one."""
    kernels, twin = pair_of_codecs(name, torch.bfloat16)
    pairs = [training_pair(size, torch.bfloat16, seed=size) for size in (3, 0, 65536 + HASH_BLOCK + 5, 5000)]
    new = [to_words(pair[1]) for pair in pairs]
    states = [kernels.new_state(to_words(pair[0])) for pair in pairs]
    outs = [torch.full((kernels.bound(words.numel()),), 0x5A, dtype=torch.uint8) for words in new]
    sizes = torch.zeros(len(pairs), dtype=torch.int64)
    kernels.encode_many(new, states, outs, sizes)
    targets, flags = [to_words(pair[0]) for pair in pairs], new_flags(len(pairs), CPU)
    payloads = [out[:size].clone() for out, size in zip(outs, sizes.tolist(), strict=True)]
    kernels.decode_apply_many(payloads, targets, flags)
    if flags[:, 0].any() or not all(map(torch.equal, targets, new)):
        raise SystemExit(f"{name}: several segments: {flags.tolist()}")
    for (old, _), words, payload in zip(pairs, new, payloads, strict=True):
        target, flag = to_words(old), new_flags(1, CPU)
        twin.decode_apply(payload, target, flag)
        if flag[0, 0] or not torch.equal(target, words):
            raise SystemExit(f"{name}: the twin cannot read one of several segments")


def check(name: str, case: str) -> None:
    others = {"damage": damage, "segments": segments}
    others[case](name) if case in others else compare(name, DTYPES[case])


if __name__ == "__main__":
    report(check, sys.argv[1], sys.argv[2:])
