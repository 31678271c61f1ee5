"""Copying rows out to several places and summing several places into a row, with their gradients.

`expand` and `reduce` are each other's backward. Sums run in fp32 in the order of the table's columns and are
rounded once, so that results depend neither on the machine nor on the run.
"""

import torch

from megatron_ciera.moe import devices


def gather_rows(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """[rows, H], [places] int64 -> [places, H]: row `source[p]` at place p."""
    if _has_kernels(x):
        from megatron_ciera.moe import kernels

        return kernels.gather_rows(x, source)
    return x.index_select(0, source)


def sum_rows(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[places, H], [rows, w] int64 (-1: nothing) -> [rows, H]: fp32 sums in column order, rounded to x.dtype.

    Allocates one fp32 accumulator of the result's shape. fp64 stays fp64. No host synchronisation.
    """
    if _has_kernels(x):
        from megatron_ciera.moe import kernels

        return kernels.sum_rows(x, table)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.new_zeros((len(table), *x.shape[1:]), dtype=wide)
    if len(x) == 0:
        return total.to(x.dtype)
    for column in table.unbind(1):
        part = x.index_select(0, column.clamp(min=0))
        total += torch.where((column >= 0)[:, None], part, 0)
    return total.to(x.dtype)


def sum_rows_reference(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Slow twin of `sum_rows`: one row and one column at a time. Defines the order of summation."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = torch.zeros((len(table), *x.shape[1:]), dtype=wide)
    for row, places in enumerate(table.tolist()):
        for place in places:
            if place >= 0:
                total[row] += x[place].to(wide)
    return total.to(x.dtype)


def _has_kernels(x: torch.Tensor) -> bool:
    return devices.has_kernels(x) and x.dim() == 2 and x.dtype != torch.float64


class _Expand(torch.autograd.Function):
    """Forward: gather_rows. Backward: sum_rows."""

    @staticmethod
    def forward(ctx, x, source, table):
        ctx.save_for_backward(source, table)
        return gather_rows(x, source)

    @staticmethod
    def backward(ctx, grad):
        _, table = ctx.saved_tensors
        return sum_rows(grad, table), None, None


class _Reduce(torch.autograd.Function):
    """Forward: sum_rows. Backward: gather_rows."""

    @staticmethod
    def forward(ctx, x, source, table):
        ctx.save_for_backward(source, table)
        return sum_rows(x, table)

    @staticmethod
    def backward(ctx, grad):
        source, _ = ctx.saved_tensors
        return gather_rows(grad, source), None, None


class _Pick(torch.autograd.Function):
    """Forward: x[index], every index at most once. Backward: the gradients put back, zero elsewhere."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.size = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size, *grad.shape[1:]).index_copy_(0, index, grad), None


def expand(x: torch.Tensor, source: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Row `source[p]` of x at place p. `table` is the inverse: the places of each row, -1 padded."""
    return _Expand.apply(x, source, table)


def reduce(x: torch.Tensor, source: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The sum of each row's places, in table order; `source` is the row of each place."""
    return _Reduce.apply(x, source, table)


def pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index] for distinct indices, with a deterministic gradient."""
    return _Pick.apply(x, index)
