"""What dispatch sends, counted on the device during training forwards and summed when it is logged."""

from dataclasses import dataclass

import torch

# Columns of a layer's summary, each summed over ranks and iterations.
ROWS, STOCK, TOKENS, INTRA_ROWS, INTER_ROWS, INTRA_STOCK, INTER_STOCK = range(7)
NUM_COLUMNS = 7


@dataclass
class LayerCounter:
    """Rows and assignments that this rank sent to each expert-parallel rank since the last reading.

    rows: [EP], assignments: [E] by slot, int64; hops, with relays: [4] int64, rows and then assignments that left
    this rank inside its node and to other nodes. On the device, so that counting never waits.
    """

    rows: torch.Tensor
    assignments: torch.Tensor
    hops: torch.Tensor | None = None
    tokens: int = 0

    @classmethod
    def zeros(cls, num_ranks: int, num_experts: int, device, relays: bool = False) -> "LayerCounter":
        sizes = (num_ranks, num_experts, 4)
        rows, assignments, hops = (torch.zeros(size, dtype=torch.int64, device=device) for size in sizes)
        return cls(rows, assignments, hops if relays else None)

    def add(self, rows: torch.Tensor, expert_assignments: torch.Tensor, tokens: int) -> None:
        """[EP] rows for each rank, [E] assignments for each slot. No host synchronisation."""
        self.rows += rows
        self.assignments += expert_assignments
        self.tokens += tokens

    def add_hop(
        self, rows: torch.Tensor, expert_assignments: torch.Tensor, my_place: int, inside: bool
    ) -> None:
        """One hop of two: [ranks] rows and [E] assignments over the hop's group, where this rank is `my_place`."""
        assignments = expert_assignments.view(len(rows), -1).sum(1)
        first = 0 if inside else 1
        self.hops[first] += rows.sum() - rows[my_place]
        self.hops[first + 2] += assignments.sum() - assignments[my_place]

    def summary(self, my_rank: int, same_node: torch.Tensor) -> torch.Tensor:
        """[NUM_COLUMNS + EP] int64: the columns above, then assignments per rank. Host sync: none.

        same_node: [EP] bool, expert-parallel ranks on this rank's node, itself included.
        """
        intra = same_node.clone()
        intra[my_rank] = False
        assignments = self.assignments.view(len(self.rows), -1).sum(1)
        columns = [self.rows.sum(), assignments.sum(), assignments.new_tensor(self.tokens)]
        if self.hops is not None:
            columns += self.hops.unbind()
        else:
            for values in (self.rows, assignments):
                columns += [(values * intra).sum(), (values * ~same_node).sum()]
        return torch.cat([torch.stack(columns), assignments])

    def reset(self) -> None:
        """Starts the next interval."""
        self.tokens = 0
        for values in (self.rows, self.assignments, self.hops):
            if values is not None:
                values.zero_()


def metrics(layers: torch.Tensor, volume: "Volume | None") -> dict[str, float]:
    """Metrics of one interval from [layers, NUM_COLUMNS + EP] sums over ranks. Host synchronisation: one.

    Counts are exact integers summed over ranks, layers, micro-batches and iterations, forward dispatch only.
    `moe/rows_sent` counts local rows too; bytes count what leaves a rank, dispatch and combine of the forward
    pass (the backward pass sends the same rows again). Without `volume` (dispatchers that are not all-to-all)
    only what routing and placement decide is reported. Layers without tokens are left out of the shares.
    """
    layers = layers.cpu()
    values = {
        "moe/rows_stock": int(layers[:, STOCK].sum()),
        "moe/rows_distinct": int(layers[:, ROWS].sum()),
        "moe/tokens": int(layers[:, TOKENS].sum()),
    }
    if volume is not None:
        values.update(volume.of(layers))
    seen = layers[layers[:, STOCK] > 0]
    if len(seen) == 0:
        return values
    removed = 1 - seen[:, ROWS].double() / seen[:, STOCK].double()
    load = seen[:, NUM_COLUMNS:].double()
    load = load.max(1).values / load.mean(1)
    for name, shares in (("rows_removed", removed), ("rank_load", load)):
        values[f"moe/{name}"] = shares.mean().item()
        for percent in (5, 50, 95):
            values[f"moe/{name}_p{percent}"] = torch.quantile(shares, percent / 100).item()
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
