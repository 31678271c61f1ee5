"""Triton kernels in the interpreter (no GPU) against their torch twins, bit for bit. Exits 1 at a difference."""

import dataclasses
import os
import sys
from pathlib import Path

if "--gpu" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from routing_cases import routing_cases  # noqa: E402

from megatron_ciera.moe import kernels, plan, plan_kernels, rows  # noqa: E402

WIDTHS = (1, 24, 1024, 1500)
DEVICE = "cuda" if "--gpu" in sys.argv else "cpu"


def bits(x):
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def compare(name, x, source, table):
    for kernel, twin, index in (
        (kernels.gather_rows, rows.gather_rows, source),
        (kernels.sum_rows, rows.sum_rows_reference, table),
    ):
        found = kernel(x.to(DEVICE), index.to(DEVICE)).cpu()
        expected = twin(x, index)
        if not torch.equal(bits(found), bits(expected)):
            sys.exit(f"{name}: {kernel.__name__} differs from its twin for {x.dtype} of width {x.shape[1]}")


def values(shape, dtype):
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        # Triton's interpreter cuts fp32 to bf16 instead of rounding, and loses denormals: sums stay exact here.
        return torch.randint(-8, 9, shape).to(dtype)
    x = torch.randn(shape).to(dtype)
    x[::5] = -0.0
    x[1::7] *= 1e-38
    return x


def cut(values, rows, assignments):
    """What is behind the totals is arbitrary."""
    token_of_row, rows_of_token, entries, tags = values
    return token_of_row[:rows], rows_of_token, entries[:assignments], tags[:assignments]


def same(name, kernel, found, twin):
    for field, expected, value in zip(
        dataclasses.fields(twin), dataclasses.astuple(twin), found, strict=True
    ):
        if value.dtype != expected.dtype or not torch.equal(value.cpu(), expected):
            sys.exit(f"{name}: {kernel.__name__} differs from its twin in {field.name}")


def compare_plans(name, routing_map, ranks, topk):
    """Returns the twin's plan of what is sent."""
    local = routing_map.shape[1] // ranks
    counts = plan.count(routing_map, ranks)
    rows, assignments = counts.table[:, 0].tolist(), counts.table[:, -1].tolist()
    send = plan.plan_send(routing_map, ranks, topk, counts).cut_to(sum(rows), sum(assignments))
    there = routing_map.to(DEVICE)
    table, columns = plan_kernels.count(there, ranks)
    if not torch.equal(table.cpu(), counts.table):
        sys.exit(f"{name}: count differs from its twin")
    places, tokens = min(topk, ranks), len(routing_map)
    made = plan_kernels.plan_send(
        there, table, columns, places, tokens * places, tokens * topk, plan.tag_dtype(local)
    )
    same(name, plan_kernels.plan_send, cut(made, sum(rows), sum(assignments)), send)
    for rank, tags in enumerate(send.tags.split(assignments)):
        # Twice, as if from two sources: assignments of an expert then come in several runs.
        tags, received = tags.repeat(2), 2 * rows[rank]
        twin = plan.plan_receive(tags, topk, local, received)
        made = plan_kernels.plan_receive(tags.to(DEVICE), min(topk, local), local, received)
        same(name, plan_kernels.plan_receive, made, twin)
    return send


def main():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    for name, (routing_map, ranks, topk) in routing_cases().items():
        send = compare_plans(name, routing_map, ranks, topk)
        thorough = name == "dropped tokens and an empty expert" or DEVICE == "cuda"
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if thorough else (torch.bfloat16,):
            for width in WIDTHS if thorough else (24,):
                places = len(send.token_of_row)
                # One tensor serves both directions: it has as many rows as the larger of the two.
                x = values((max(places, len(routing_map)), width), dtype)
                compare(name, x, send.token_of_row, send.rows_of_token)
    print("equal")


if __name__ == "__main__":
    main()
