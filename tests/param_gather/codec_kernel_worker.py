"""Runs the kernels in Triton's interpreter on CPU and compares payloads with the twins', byte by byte.

A process of its own, since the interpreter is chosen by an environment variable before Triton is imported.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import sys  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from codec_cases import damaged, patterns, round_trip, to_words  # noqa: E402
from interpreted import report  # noqa: E402

from megatron_ciera.param_gather.codec import HASH_BLOCK, make_codec, new_flags  # noqa: E402
from megatron_ciera.param_gather.codec.packed_exponents_triton import PackedExponentReuseTriton  # noqa: E402
from megatron_ciera.param_gather.codec.packed_triton import PackedDeltaTriton  # noqa: E402

KERNELS = {"delta": PackedDeltaTriton, "exponent-reuse": PackedExponentReuseTriton}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def compare(name: str, dtype: torch.dtype) -> None:
    kernels, twin = KERNELS[name](dtype, 512, torch.device("cpu")), make_codec(name, "packed", dtype)
    for size, cases in (
        (1, ("noise",)),
        (600, ("training with specials", "noise")),
        (
            4097,
            ("training with specials", "unchanged")
            if dtype is torch.bfloat16
            else ("training with specials",),
        ),
    ):
        for case in cases:
            old, new = patterns(size, dtype)[case]
            if not np.array_equal(round_trip(kernels, old, new), round_trip(twin, old, new)):
                raise SystemExit(f"{name} {dtype} {size} {case}: kernel and twin wrote different bytes")


def damage(name: str) -> None:
    kernels = KERNELS[name](torch.bfloat16, 512, torch.device("cpu"))
    # Only whole blocks are coded as deltas, and take seconds each here: every third damage must do.
    size, every = (HASH_BLOCK, 3) if name == "delta" else (700, 1)
    old, new = patterns(size, torch.bfloat16)["training"]
    for payload in list(damaged(round_trip(kernels, old, new), count=3))[::every]:
        target, flags = to_words(old), new_flags(1, "cpu")
        kernels.decode_apply(torch.from_numpy(payload), target, flags)
        kept = flags.tolist() == [[1, 0]] and torch.equal(target, to_words(old))
        unharmed = flags[0, 0] == 0 and torch.equal(target, to_words(new))
        if not kept and not unharmed:
            raise SystemExit(f"{name}: a damaged payload went unnoticed: {flags.tolist()}")


def check(name: str, case: str) -> None:
    damage(name) if case == "damage" else compare(name, DTYPES[case])


if __name__ == "__main__":
    report(check, sys.argv[1], sys.argv[2:])
