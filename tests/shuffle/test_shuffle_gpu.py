"""The planner on a GPU: launched, replayed as a graph and on CPU it finds the same integers."""

import pytest
import torch
from shuffle_files import random_tables

from megatron_ciera.shuffle.layout import Layout, canonical
from megatron_ciera.shuffle.planner import Solver
from megatron_ciera.shuffle.solve import Shape, solve, unpack
from megatron_ciera.shuffle.tables import ScoreTables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.mark.parametrize(
    ("ranks", "columns", "tokens"), [(2, 1, 8192), (8, 2, 4096), (4, 3, 12), (3, 1, 99), (2, 1, 65536)]
)
def test_a_replayed_plan_is_the_launched_one_and_that_of_the_cpu(ranks, columns, tokens):
    made, generator = random_tables(16, ranks, seed=1), torch.Generator().manual_seed(0)
    shape = Shape(tokens * columns, columns, ranks, ranks - 1)
    old = {device: canonical(shape.num_tokens, device) for device in ("cpu", "cuda")}
    tables = {device: ScoreTables.of(made, device) for device in old}
    solver, stream = Solver(tables["cuda"], shape), torch.cuda.Stream()
    for _ in range(4):
        experts = [torch.randint(0, 16, (shape.num_tokens, 4), generator=generator) for _ in range(2)]
        wanted = solve(tables["cpu"], *experts, old["cpu"], shape)
        with torch.cuda.stream(stream):
            found = solver(*(of.cuda() for of in experts), old["cuda"])
        stream.synchronize()
        assert torch.equal(found.cpu(), wanted)
        layout = unpack(found, shape).layout
        old = {"cpu": unpack(wanted, shape).layout, "cuda": Layout(layout.token_at, layout.place_of)}
