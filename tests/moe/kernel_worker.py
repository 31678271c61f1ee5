"""Triton kernels in the interpreter (no GPU) against their torch twins, bit for bit. Exits 1 at a difference."""

import os
import sys
from pathlib import Path

if "--gpu" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from routing_cases import routing_cases  # noqa: E402

from megatron_ciera.moe import kernels, plan, rows  # noqa: E402

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


def main():
    torch.manual_seed(0)
    for name, (routing_map, ranks, topk) in routing_cases().items():
        counted = [int(total.sum()) for total in plan.count(routing_map, ranks)]
        send = plan.plan_send(routing_map, ranks, topk).cut_to(*counted)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for width in WIDTHS if name == "dropped tokens and an empty expert" else (24,):
                places = len(send.token_of_row)
                # One tensor serves both directions: it has as many rows as the larger of the two.
                x = values((max(places, len(routing_map)), width), dtype)
                compare(name, x, send.token_of_row, send.rows_of_token)
    print("equal")


if __name__ == "__main__":
    main()
