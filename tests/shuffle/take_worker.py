"""The kernel that takes tokens, in Triton's interpreter, against its torch twin. Exits 1 at a difference."""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from megatron_ciera.shuffle import owners, take_kernel  # noqa: E402

generator = torch.Generator().manual_seed(0)
for columns, ranks, tokens, kinds in (
    (3, 4, 64, 1000),
    (2, 8, 24, 3),
    (1, 3, 33, 2),
    (2, 2, 2, 9),
    (1, 8, 128, 1),
):
    priced = torch.randint(0, kinds, (columns, ranks, tokens), generator=generator).double() / 2
    order = torch.stack([torch.randperm(tokens, generator=generator) for _ in range(columns)])
    found = take_kernel.take(priced, order, tokens // ranks)
    if not torch.equal(found, owners.take_reference(priced, order, tokens // ranks)):
        sys.exit(f"take differs from its twin for {columns} columns of {tokens} tokens on {ranks} ranks")
print("equal")
