"""Slow, clear twins of plan.py: plain loops over tokens, ranks and experts, in the same order."""

import torch

from megatron_ciera.moe.plan import ReceivePlan, SendPlan, tag_dtype


def plan_send_reference(routing_map: torch.Tensor, num_ranks: int, topk: int) -> SendPlan:
    """Twin of plan_send: rows by (rank, token), assignments by (rank, token, expert)."""
    selected = routing_map.tolist()
    local = routing_map.shape[1] // num_ranks
    dtype = tag_dtype(local)
    top_bit = 0x80 if dtype == torch.uint8 else -0x8000
    token_of_row, entries, tags = [], [], []
    rows_of_token = [[] for _ in selected]
    for rank in range(num_ranks):
        for token, experts in enumerate(selected):
            here = [e for e in range(local) if experts[rank * local + e]]
            if not here and topk >= num_ranks:
                rows_of_token[token].append(-1)
            if here:
                rows_of_token[token].append(len(token_of_row))
                token_of_row.append(token)
            for expert in here:
                entries.append(token * num_ranks * local + rank * local + expert)
                tags.append(expert | top_bit if expert == here[0] else expert)
    width = min(topk, num_ranks)
    return SendPlan(
        token_of_row=torch.tensor(token_of_row, dtype=torch.int64),
        rows_of_token=_padded(rows_of_token, width),
        entry_of_assignment=torch.tensor(entries, dtype=torch.int64),
        tags=torch.tensor(tags, dtype=dtype),
    )


def plan_receive_reference(tags: torch.Tensor, topk: int, num_local_experts: int, rows: int) -> ReceivePlan:
    """Twin of plan_receive: places by (expert, row)."""
    small = tags.dtype == torch.uint8
    assignments, row = [], -1
    for number, tag in enumerate(tags.tolist()):
        row += tag >= 0x80 if small else tag < 0
        assignments.append((tag & (0x7F if small else 0x7FFF), row, number))
    places_of_row = [[] for _ in range(rows)]
    for place, (_, row, _) in enumerate(sorted(assignments)):
        places_of_row[row].append(place)
    return ReceivePlan(
        row_of_place=torch.tensor([row for _, row, _ in sorted(assignments)], dtype=torch.int64),
        assignment_of_place=torch.tensor([n for _, _, n in sorted(assignments)], dtype=torch.int64),
        places_of_row=_padded(places_of_row, min(topk, num_local_experts)),
    )


def _padded(lists: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor([row + [-1] * (width - len(row)) for row in lists], dtype=torch.int64).view(
        len(lists), width
    )
