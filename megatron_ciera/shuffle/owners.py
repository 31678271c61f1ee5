"""Who owns which token, on the device: `placement.assignment.assign_owners` for all columns of a batch at once.

s tokens a column, B columns (sequences of the micro-batch), N ranks. Every rank owns exactly s / N tokens of
every column. Scores are integers and prices their dyadic fractions, so fp64 computes them exactly: the owners
are the same on every rank, on every device, and those of the twin in placement/assignment.py.
"""

import torch

# More rounds win less than 0.1 points of locality on data/routing (8: 20.98 % against 20.90 %, top-6 at EP 8).
PRICE_ROUNDS = 4


def assign(scores: torch.Tensor) -> torch.Tensor:
    """[B, N, s] int64 scores -> [B, s] int64 owners.

    Prices on crowded ranks first, then tokens in decreasing confidence (best minus second best priced score) to
    their most preferred rank with room, in N rounds; ties go to the lower token and the lower rank. No host
    synchronisation.
    """
    priced = scores.double()
    room = scores.shape[2] // scores.shape[1]
    prices = priced.new_zeros((len(scores), scores.shape[1], 1))
    for _ in range(PRICE_ROUNDS):
        prices = prices + 0.5 * _threshold(priced - prices, room)
    priced = priced - prices
    best, second = _best_two(priced)
    order = torch.argsort((second - best).squeeze(1), dim=1, stable=True)
    return take(priced, order, room)


def _threshold(priced: torch.Tensor, room: int) -> torch.Tensor:
    """[B, N, 1]: by how much each rank's price may rise until exactly `room` tokens still prefer it."""
    best, second = _best_two(priced)
    advantage = priced - torch.where(priced == best, second, best)
    # The room-th largest. Not kthvalue, which --deterministic-mode refuses on GPUs.
    return advantage.topk(room, dim=2, sorted=False).values.amin(2, keepdim=True)


def _best_two(priced: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, 1, s] each: a token's best and second best score, equal in a tie."""
    best, rank = priced.max(dim=1, keepdim=True)
    ranks = torch.arange(priced.shape[1], device=priced.device)[:, None]
    return best, priced.masked_fill(rank == ranks, -torch.inf).amax(dim=1, keepdim=True)


def take(priced: torch.Tensor, order: torch.Tensor, room: int) -> torch.Tensor:
    """[B, N, s] scores, [B, s] tokens in the order in which they choose, places on a rank -> [B, s] owners."""
    if priced.is_cuda:
        from megatron_ciera.shuffle import take_kernel

        if priced.shape[2] <= take_kernel.MOST_TOKENS:
            return take_kernel.take(priced, order, room)
    return take_reference(priced, order, room)


def take_reference(priced: torch.Tensor, order: torch.Tensor, room: int) -> torch.Tensor:
    """Twin of `take`: N rounds, in each of which every waiting token asks its best rank that has room."""
    in_line = priced.gather(2, order[:, None].expand_as(priced))
    ranks = torch.arange(priced.shape[1], device=priced.device)[:, None]
    left = torch.full_like(priced[:, :, :1], room, dtype=torch.int64)
    owners = torch.full_like(order, -1)
    for _ in range(priced.shape[1]):
        wanted = in_line.masked_fill(left == 0, -torch.inf).argmax(dim=1)
        wants = (wanted[:, None] == ranks) & (owners < 0)[:, None]
        taken = wants & (wants.cumsum(2) <= left)
        owners = torch.where(taken.any(1), wanted, owners)
        left = left - taken.sum(2, keepdim=True)
    return torch.empty_like(owners).scatter_(1, order, owners)


def spilled(scores: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """int64 scalar: tokens whose owner is not the rank they score highest on."""
    return (scores.argmax(1) != owners).sum()
