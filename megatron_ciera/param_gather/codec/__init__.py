"""Lossless codecs for parameter words. Contract: `base.py`. Bytes: docs/codec.md."""

import logging

import torch

from .base import NO_BAD_BLOCK, Codec, new_flags
from .container import HEADER_BYTES
from .words import HASH_BLOCK, as_words

CODECS = ("exponent-reuse", "delta")
CODERS = ("auto", "ans", "packed")

_LOG = logging.getLogger(__name__)

__all__ = [
    "CODECS",
    "CODERS",
    "Codec",
    "HASH_BLOCK",
    "HEADER_BYTES",
    "NO_BAD_BLOCK",
    "as_words",
    "make_codec",
    "new_flags",
]


def make_codec(
    name: str, coder: str, dtype: torch.dtype, block_size: int = 512, device: torch.device | str = "cpu"
) -> Codec:
    """The codec ``name`` ('exponent-reuse' or 'delta') with entropy coder ``coder`` for parameters of
    ``dtype``.

    ``block_size``: values of one exponent block, used by `exponent-reuse`, checked by both ends in every
    payload. ``coder`` 'auto' is 'ans' on CPU and 'packed' on a GPU, where it is logged. ValueError for anything
    unknown or not available on ``device``, with the way out.
    """
    device = torch.device(device)
    if name not in CODECS:
        raise ValueError(f"codec {name!r}: wanted one of {', '.join(CODECS)}")
    if coder not in CODERS:
        raise ValueError(f"coder {coder!r}: wanted one of {', '.join(CODERS)}")
    if block_size < 1:
        raise ValueError(f"--ciera-block-size {block_size}: wanted at least 1 value a block")
    if device.type == "cpu":
        return _cpu_codec(name, coder)(dtype, block_size, device)
    if coder == "auto":
        coder = "packed"  # fastest, smallest for differences, and runs on every GPU
        _LOG.info("--ciera-coder auto: codec %s of %s on %s uses coder %s", name, dtype, device, coder)
    return _gpu_codec(name, coder)(dtype, block_size, device)


def _cpu_codec(name: str, coder: str) -> type[Codec]:
    if coder == "packed":
        from .packed_delta import PackedDelta
        from .packed_exponents import PackedExponentReuse

        return {"delta": PackedDelta, "exponent-reuse": PackedExponentReuse}[name]
    from .delta_cpu import DeltaCpu
    from .exponent_reuse_cpu import ExponentReuseCpu

    return {"delta": DeltaCpu, "exponent-reuse": ExponentReuseCpu}[name]


def _gpu_codec(name: str, coder: str) -> type[Codec]:
    if coder == "ans":
        if torch.version.hip:
            raise ValueError("coder 'ans' on ROCm: nvCOMP is NVIDIA's only; use --ciera-coder packed")
        from .ans_codecs import AnsDelta, AnsExponentReuse

        return {"delta": AnsDelta, "exponent-reuse": AnsExponentReuse}[name]
    from .packed_exponents_triton import PackedExponentReuseTriton
    from .packed_triton import PackedDeltaTriton

    return {"delta": PackedDeltaTriton, "exponent-reuse": PackedExponentReuseTriton}[name]
