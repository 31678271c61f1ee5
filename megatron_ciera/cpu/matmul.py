"""16-bit matrix products on a CPU that has no instructions for them: fp32 products, rounded once.

oneDNN multiplies bfloat16 from AVX-512 on and float16 from AVX512-FP16 on. Below that torch falls to loops
that are 10 to 50 times slower than the fp32 product, forward and backward. The result here is what a tensor
core gives: products and sums in fp32, one rounding to the 16-bit dtype at the end.
"""

import warnings

import torch

_library: torch.library.Library | None = None
_slow_dtypes: set[torch.dtype] = set()


def slow_dtypes() -> set[torch.dtype]:
    """The 16-bit dtypes whose products this CPU does not have in hardware."""
    dtypes = set()
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        dtypes.add(torch.float16)
    return dtypes


def install() -> None:
    """Register the CPU kernels of mm, bmm, addmm and baddbmm, below autograd; nothing if none is slow."""
    global _library
    if _library is not None:
        return
    _slow_dtypes.update(slow_dtypes())
    if not _slow_dtypes:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verrid", category=UserWarning)
        for name in ("mm", "bmm", "addmm", "baddbmm"):
            # The out= overload has a kernel of its own, which stays torch's.
            _library.impl(name, _kernel(getattr(torch.ops.aten, name).out), "CPU")


def _kernel(product_into):
    """A kernel with the arguments of `product_into` (an out= overload) but for `out`, which it returns."""

    def product(*tensors, **scalars):
        dtype = tensors[0].dtype
        if dtype not in _slow_dtypes:
            return product_into(*tensors, **scalars, out=tensors[0].new_empty(0))
        wide = [tensor.float() for tensor in tensors]
        return product_into(*wide, **scalars, out=wide[0].new_empty(0)).to(dtype)

    return product
