"""Triton kernels behind rows.py on a GPU (NVIDIA and AMD): copy rows out, sum rows in. Twins: rows.py in torch.

Both read and write every value once, fp32 sums stay in registers. One program handles BLOCK columns of one row.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _gather_kernel(x, source, out, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row = tl.load(source + place)
    tl.store(out + place * width + columns, tl.load(x + row * width + columns, mask=inside), mask=inside)


@triton.jit
def _sum_kernel(x, table, out, width, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in tl.static_range(PLACES):
        place = tl.load(table + row * PLACES + number)
        part = tl.load(x + place * width + columns, mask=inside & (place >= 0), other=0.0)
        total += part.to(tl.float32)
    tl.store(out + row * width + columns, total.to(out.dtype.element_ty), mask=inside)


def gather_rows(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Twin of rows.gather_rows for [rows, H] x of any dtype, contiguous. No host synchronisation."""
    out = x.new_empty((len(source), x.shape[1]))
    if out.numel():
        x = x.contiguous()
        _gather_kernel[_grid(out)](x, source, out, x.shape[1], BLOCK=_BLOCK)
    return out


def sum_rows(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Twin of rows.sum_rows for bf16, fp16 and fp32. No host synchronisation, no accumulator in memory."""
    out = x.new_empty((len(table), x.shape[1]))
    if len(x) == 0:
        return out.zero_()
    if out.numel():
        x, table = x.contiguous(), table.contiguous()
        _sum_kernel[_grid(out)](x, table, out, x.shape[1], PLACES=table.shape[1], BLOCK=_BLOCK)
    return out


def _grid(out: torch.Tensor) -> tuple[int, int]:
    return len(out), triton.cdiv(out.shape[1], _BLOCK)
