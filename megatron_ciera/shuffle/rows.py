"""Rows put in another order, and the exchange of rows between ranks, with their gradients: copies only, exact."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ciera.moe.rows import gather_rows
from megatron_ciera.shuffle.layout import RowMove


def reorder(x: torch.Tensor, source: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """[s, b, H] -> row `source[i]` at flat place i, same shape. `back` is the inverse of `source`."""
    # Shapes change out here: what an autograd function returns must be no view, or nobody may write to it.
    return _Reorder.apply(x.reshape(len(source), -1), source, back).view(x.shape)


class _Reorder(torch.autograd.Function):
    """Forward: rows by `source`. Backward: gradients by its inverse."""

    @staticmethod
    def forward(ctx, rows, source, back):
        ctx.save_for_backward(back)
        return gather_rows(rows, source)

    @staticmethod
    def backward(ctx, grad):
        (back,) = ctx.saved_tensors
        return gather_rows(grad, back), None, None


@dataclass
class RowExchange:
    """Rows of a shard under way from one layout to another, over `group`, and later their gradients back.

    to, from_: rows to and from each rank, on the host. `work`: the collective under way, with what it reads.
    """

    move: RowMove
    to: list[int]
    from_: list[int]
    group: dist.ProcessGroup
    work: tuple | None = None

    def depart(self, rows: torch.Tensor) -> torch.Tensor:
        """[s/N, b, H] rows of this rank leave; returns what `arrive` takes. Its values are not there yet.

        Called in front of attention, so that rows travel while it computes; in the backward pass autograd comes
        back to what was called first last, so that gradients travel while it computes as well.
        """
        return _Depart.apply(rows.reshape(len(self.move.send_order), -1), self)

    def arrive(self, under_way: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Waits for the rows and returns them in the new layout, in `shape` ([s/N, b, H])."""
        return _Arrive.apply(under_way, self).view(shape)

    def start(self, rows: torch.Tensor, order: torch.Tensor, to: list[int], from_: list[int]) -> torch.Tensor:
        """Sends rows of [n, H] in `order`; returns the buffer that they will arrive in."""
        packed = gather_rows(rows, order)
        received = torch.empty_like(packed)
        work = dist.all_to_all_single(received, packed, from_, to, group=self.group, async_op=True)
        self.work = work, packed
        return received

    def finish(self, received: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """Waits (the stream does, on a GPU) and puts the rows that arrived at their places."""
        work, _ = self.work
        work.wait()
        self.work = None
        return gather_rows(received, place)


class _Depart(torch.autograd.Function):
    """Forward: rows leave. Backward: their gradients have come back."""

    @staticmethod
    def forward(ctx, rows, exchange):
        ctx.exchange = exchange
        return exchange.start(rows, exchange.move.send_order, exchange.to, exchange.from_)

    @staticmethod
    def backward(ctx, grad):
        return ctx.exchange.finish(grad, ctx.exchange.move.send_place), None


class _Arrive(torch.autograd.Function):
    """Forward: rows have arrived. Backward: their gradients leave."""

    @staticmethod
    def forward(ctx, under_way, exchange):
        ctx.exchange = exchange
        return exchange.finish(under_way, exchange.move.arrival_place)

    @staticmethod
    def backward(ctx, grad):
        exchange = ctx.exchange
        return exchange.start(grad, exchange.move.arrival_order, exchange.from_, exchange.to), None
