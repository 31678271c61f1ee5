"""All-to-all of rows and of assignments, with gradients that take the way back."""

import torch
import torch.distributed as dist


def all_to_all(x: torch.Tensor, send: list[int], receive: list[int], group) -> torch.Tensor:
    """Sends `send[r]` leading entries of contiguous x to rank r, in rank order; returns what arrives.

    Every rank of `group` takes part, also with nothing to send or receive. Host synchronisation: none.

    Raises:
        ValueError: the splits do not add up to the length of x; before the collective.
    """
    if sum(send) != len(x):
        raise ValueError(
            f"deduplicating dispatcher: rank {dist.get_rank(group)} has {len(x)} entries to send, but the splits "
            f"{send} add up to {sum(send)}: the routing map changed after it was counted"
        )
    received = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), receive, send, group=group)
    return received


class _ExchangeRows(torch.autograd.Function):
    """Forward: rows to their ranks. Backward: gradients of rows back to where they came from."""

    @staticmethod
    def forward(ctx, rows, send, receive, group):
        ctx.splits = send, receive, group
        return all_to_all(rows, send, receive, group)

    @staticmethod
    def backward(ctx, grad):
        send, receive, group = ctx.splits
        return all_to_all(grad.contiguous(), receive, send, group), None, None, None


class _ExchangeAssignments(torch.autograd.Function):
    """Forward: probabilities and tags in one payload. Backward: gradients of probabilities back."""

    @staticmethod
    def forward(ctx, probs, tags, send, receive, group):
        ctx.splits = send, receive, group
        payload = torch.cat([_as_bytes(probs), _as_bytes(tags)], dim=1)
        payload = all_to_all(payload, send, receive, group)
        width = probs.element_size()
        tags = _from_bytes(payload[:, width:], tags.dtype)
        ctx.mark_non_differentiable(tags)
        return _from_bytes(payload[:, :width], probs.dtype), tags

    @staticmethod
    def backward(ctx, grad, _):
        send, receive, group = ctx.splits
        return all_to_all(grad.contiguous(), receive, send, group), None, None, None, None


def exchange_rows(rows: torch.Tensor, send: list[int], receive: list[int], group) -> torch.Tensor:
    """[rows, H] to the ranks of `group` by splits; returns [sum(receive), H]. See `all_to_all`."""
    return _ExchangeRows.apply(rows, send, receive, group)


def exchange_assignments(
    probs: torch.Tensor, tags: torch.Tensor, send: list[int], receive: list[int], group
) -> tuple[torch.Tensor, torch.Tensor]:
    """[assignments] probabilities (differentiable) and tags, together in one collective."""
    return _ExchangeAssignments.apply(probs, tags, send, receive, group)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.uint8).view(len(x), x.element_size())


def _from_bytes(payload: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return payload.contiguous().view(-1).view(dtype)
