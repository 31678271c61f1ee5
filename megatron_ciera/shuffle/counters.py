"""What shuffling wins and costs, counted on the device and summed over ranks when it is logged or judged."""

import math
from dataclasses import dataclass

import torch

# Columns of a layer's counts, each summed over ranks and iterations.
TOKENS, ASSIGNMENTS, LOCAL, LOCAL_CANONICAL, ROWS_LOCAL, ROWS_LOCAL_CANONICAL, SPILLED, PLANNED, MOVED = (
    range(9)
)
NUM_COLUMNS = 9


class ShuffleCounter:
    """Counts of one layer on one rank: [NUM_COLUMNS] int64 on the device, so that counting never waits."""

    def __init__(self, device):
        self.device = device
        self.counts = torch.zeros(NUM_COLUMNS, dtype=torch.int64, device=device)

    def add_routing(
        self, experts: torch.Tensor, expert_to_rank: torch.Tensor, owner: torch.Tensor, share
    ) -> None:
        """Where the experts that tokens selected are, against their owner and against their place by position.

        experts: [T, k] in canonical order; expert_to_rank: [E]; owner: [T] rank that holds each token; share:
        (first, end) of the tokens that this rank counts, its canonical shard.
        """
        first, end = share
        ranks = expert_to_rank[experts[first:end]]
        by_position = first // (end - first)
        for column, rows_column, holder in (
            (LOCAL, ROWS_LOCAL, owner[first:end, None]),
            (LOCAL_CANONICAL, ROWS_LOCAL_CANONICAL, by_position),
        ):
            here = ranks == holder
            self.counts[column] += here.sum()
            self.counts[rows_column] += here.any(1).sum()
        self.counts[TOKENS] += end - first
        self.counts[ASSIGNMENTS] += ranks.numel()

    def add_spill(self, spilled: torch.Tensor, num_tokens: int, rank: int) -> None:
        """Tokens of all ranks whose owner is not their best rank; counted on rank 0."""
        if rank == 0:
            self.counts[SPILLED] += spilled
            self.counts[PLANNED] += num_tokens

    def add_moved(self, rows_to: torch.Tensor, rank: int) -> None:
        """[N] rows that this rank sends to each rank."""
        self.counts[MOVED] += rows_to.sum() - rows_to[rank]

    def reset(self) -> None:
        """Starts the next interval."""
        self.counts.zero_()


@dataclass(frozen=True)
class Prices:
    """Turns counts into bytes. deduplicated: dispatch sends one row for each (token, rank), else each assignment.

    row_bytes: a hidden state; residual_bytes: one of the residual stream; gather_bytes: what telling the others
    a token's experts sends, for each token. exchanged: whether residual rows travel by themselves.
    """

    deduplicated: bool
    row_bytes: int
    residual_bytes: int
    gather_bytes: int
    exchanged: bool = True

    def saved(self, counts: torch.Tensor) -> int:
        """Bytes that dispatch and combine of a forward pass send less."""
        columns = (ROWS_LOCAL, ROWS_LOCAL_CANONICAL) if self.deduplicated else (LOCAL, LOCAL_CANONICAL)
        return 2 * self.row_bytes * int(counts[columns[0]] - counts[columns[1]])

    def residual(self, counts: torch.Tensor) -> int:
        """Bytes of residual rows that follow their tokens, in a forward pass; hidden under attention."""
        return self.residual_bytes * int(counts[MOVED]) if self.exchanged else 0

    def planning(self, counts: torch.Tensor) -> int:
        """Bytes of the experts' numbers that ranks tell each other."""
        return self.gather_bytes * int(counts[TOKENS])


def metrics(names: list[str], layers: torch.Tensor, prices: Prices) -> dict[str, float]:
    """Metrics of one interval from [layers, NUM_COLUMNS] sums over ranks. Empty when nothing was shuffled.

    Shares are over the layers that were shuffled; bytes leave a rank in the forward pass. The layer that only goes
    back to canonical order counts among the bytes; layers that did nothing are left out.
    """
    layers = layers.cpu()
    total = layers.sum(0)
    if total[PLANNED] == 0 and total[MOVED] == 0:
        return {}
    values = {}
    if total[ASSIGNMENTS]:
        values["moe/locality"] = int(total[LOCAL]) / int(total[ASSIGNMENTS])
        values["moe/locality_by_position"] = int(total[LOCAL_CANONICAL]) / int(total[ASSIGNMENTS])
    values["moe/shuffle_spill"] = int(total[SPILLED]) / max(1, int(total[PLANNED]))
    values["moe/shuffle_rows_moved"] = int(total[MOVED])
    for name, of in (("saved", prices.saved), ("added", lambda x: prices.residual(x) + prices.planning(x))):
        values[f"moe/shuffle_bytes_{name}"] = of(total)
    for name, counts in zip(names, layers, strict=True):
        if not counts.any():
            continue
        if counts[ASSIGNMENTS]:
            by_position = int(counts[LOCAL_CANONICAL]) / int(counts[ASSIGNMENTS])
            values[f"moe/locality_by_position/{name}"] = by_position
        values[f"moe/shuffle_bytes_saved/{name}"] = prices.saved(counts)
        values[f"moe/shuffle_bytes_added/{name}"] = prices.residual(counts) + prices.planning(counts)
    return values


def repays(counts: torch.Tensor, prices: Prices) -> bool:
    """Whether a layer's trial, [NUM_COLUMNS] sums on the host, earned its keep.

    More experts must be on the owner than by position, beyond two standard errors over tokens, and dispatch and
    combine must save more than telling each other the experts sends. Residual rows are hidden under attention.
    """
    tokens, assignments = int(counts[TOKENS]), int(counts[ASSIGNMENTS])
    if tokens == 0:
        return False
    shares = [int(counts[column]) / assignments for column in (LOCAL, LOCAL_CANONICAL)]
    error = math.sqrt(sum(share * (1 - share) for share in shares) / tokens)
    return shares[0] - shares[1] > 2 * error and prices.saved(counts) > prices.planning(counts)


def verdict(counts: torch.Tensor, prices: Prices) -> str:
    """What a trial measured, in words."""
    if counts[TOKENS] == 0:
        return "no token was routed"
    local, by_position = (int(counts[c]) / int(counts[ASSIGNMENTS]) for c in (LOCAL, LOCAL_CANONICAL))
    return (
        f"locality {local:.1%}, by position {by_position:.1%} on {int(counts[TOKENS])} tokens; dispatch saved "
        f"{prices.saved(counts) / 1e6:.2f} MB, planning sent {prices.planning(counts) / 1e6:.2f} MB"
    )
