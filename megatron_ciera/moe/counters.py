"""What dispatch sends, counted on the device during training forwards and summed when it is logged."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Columns of a layer's summary, each summed over ranks and iterations.
ROWS, STOCK, TOKENS, LOCAL, INTRA_ROWS, INTER_ROWS, INTRA_STOCK, INTER_STOCK = range(8)
NUM_COLUMNS = 8


@dataclass
class LayerCounter:
    """What this rank sent in one layer since the last reading.

    table: [EP, n + 2] int64 as plan.Counts has it; hops, with relays: [4] int64, rows and then assignments that
    left this rank inside its node and to other nodes. On the device, so that counting never waits.
    """

    table: torch.Tensor
    hops: torch.Tensor | None = None
    tokens: int = 0

    @classmethod
    def zeros(cls, num_ranks: int, num_experts: int, device, relays: bool = False) -> "LayerCounter":
        table = torch.zeros((num_ranks, num_experts // num_ranks + 2), dtype=torch.int64, device=device)
        return cls(table, torch.zeros(4, dtype=torch.int64, device=device) if relays else None)

    def add(self, table: torch.Tensor, tokens: int) -> None:
        """Counts of one forward pass. One launch, no host synchronisation."""
        self.table += table
        self.tokens += tokens

    def add_hop(self, table: torch.Tensor, my_place: int, inside: bool) -> None:
        """One hop of two: the counts over the hop's group, where this rank is `my_place`."""
        sent = table[:, :: table.shape[1] - 1]
        self.hops[0 if inside else 1 :: 2] += sent.sum(0) - sent[my_place]

    def reset(self) -> None:
        """Starts the next interval."""
        self.tokens = 0
        self.table.zero_()
        if self.hops is not None:
            self.hops.zero_()


def summaries(counters: Sequence[LayerCounter | None], my_rank: int, same_node: torch.Tensor) -> torch.Tensor:
    """[layers, NUM_COLUMNS + EP] int64: the columns above, then assignments per rank; 0 for layers of others.

    same_node: [EP] bool, expert-parallel ranks on this rank's node, itself included. A few copies to the device,
    nothing is awaited.
    """
    result = torch.zeros(
        (len(counters), NUM_COLUMNS + len(same_node)), dtype=torch.int64, device=same_node.device
    )
    mine = [place for place, counter in enumerate(counters) if counter is not None]
    if not mine:
        return result
    here = [counters[place] for place in mine]
    tables = torch.stack([counter.table for counter in here])
    rows, assignments = tables[:, :, 0], tables[:, :, -1]
    intra = same_node.clone()
    intra[my_rank] = False
    if here[0].hops is not None:
        hops = torch.stack([counter.hops for counter in here])
    else:
        parts = [(values * link).sum(1) for values in (rows, assignments) for link in (intra, ~same_node)]
        hops = torch.stack(parts, dim=1)
    tokens = torch.tensor([[counter.tokens] for counter in here], device=result.device)
    local = assignments[:, my_rank, None]
    totals = [rows.sum(1, keepdim=True), assignments.sum(1, keepdim=True), tokens, local]
    result[mine] = torch.cat([*totals, hops, assignments], dim=1)
    return result


def metrics(layers: torch.Tensor, volume: "Volume | None", names: Sequence[str]) -> dict[str, float]:
    """Metrics of one interval from [layers, NUM_COLUMNS + EP] sums over ranks. Host synchronisation: one.

    Counts are exact integers summed over ranks, layers, micro-batches and iterations, forward dispatch only.
    `moe/rows_sent` counts local rows too; bytes count what leaves a rank, dispatch and combine of the forward
    pass (the backward pass sends the same rows again). Without `volume` (dispatchers that are not all-to-all)
    only what routing and placement decide is reported. Layers without tokens are left out of the shares, which are
    means over layers, percentiles over layers, and each layer's own under its name of `names`.
    """
    layers = layers.cpu()
    values = {
        "moe/rows_stock": int(layers[:, STOCK].sum()),
        "moe/rows_distinct": int(layers[:, ROWS].sum()),
        "moe/tokens": int(layers[:, TOKENS].sum()),
    }
    if volume is not None:
        values.update(volume.of(layers))
    routed = layers[:, STOCK] > 0
    seen = layers[routed]
    if len(seen) == 0:
        return values
    removed = 1 - seen[:, ROWS].double() / seen[:, STOCK].double()
    load = seen[:, NUM_COLUMNS:].double()
    load = load.max(1).values / load.mean(1)
    for name, shares in (("rows_removed", removed), ("rank_load", load)):
        values[f"moe/{name}"] = shares.mean().item()
        for percent in (5, 50, 95):
            values[f"moe/{name}_p{percent}"] = torch.quantile(shares, percent / 100).item()
    locality = seen[:, LOCAL].double() / seen[:, STOCK].double()
    names = [name for name, found in zip(names, routed.tolist(), strict=True) if found]
    for metric, shares in (("rows_removed", removed), ("rank_load", load), ("locality", locality)):
        values.update(zip((f"moe/{metric}/{name}" for name in names), shares.tolist(), strict=True))
    return values


@dataclass(frozen=True)
class Volume:
    """Turns counts into rows and bytes of an all-to-all dispatcher.

    deduplicated: one row for each (token, rank), else one for each assignment. row_bytes: a hidden state;
    assignment_bytes: what goes with each assignment (probability, tag).
    """

    deduplicated: bool
    row_bytes: int
    assignment_bytes: int

    def of(self, layers: torch.Tensor) -> dict[str, int]:
        """Rows sent, and bytes leaving ranks, from [layers, NUM_COLUMNS + EP]."""
        rows, intra, inter = (
            (ROWS, INTRA_ROWS, INTER_ROWS) if self.deduplicated else (STOCK, INTRA_STOCK, INTER_STOCK)
        )
        dispatch = {
            link: int(layers[:, remote].sum()) * self.row_bytes
            + int(layers[:, assignments].sum()) * self.assignment_bytes
            for link, remote, assignments in (("intra", intra, INTRA_STOCK), ("inter", inter, INTER_STOCK))
        }
        combine = {
            link: int(layers[:, remote].sum()) * self.row_bytes
            for link, remote in (("intra", intra), ("inter", inter))
        }
        return {
            "moe/rows_sent": int(layers[:, rows].sum()),
            "moe/bytes_sent": sum(dispatch.values()) + sum(combine.values()),
            "moe/bytes_dispatch": sum(dispatch.values()),
            "moe/bytes_combine": sum(combine.values()),
            "moe/bytes_intra_node": dispatch["intra"] + combine["intra"],
            "moe/bytes_inter_node": dispatch["inter"] + combine["inter"],
        }
