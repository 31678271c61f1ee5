"""Uneven lists and tensor split sizes over gloo, on three processes, against what each rank must get."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 3
ROWS = (2, 0, 3)


def rows_of(rank: int, count: int) -> torch.Tensor:
    return torch.full((count, 4), float(rank + 1))


def check_uneven_gather(rank: int, async_op: bool) -> None:
    gathered = torch.full((sum(ROWS), 4), torch.nan)
    work = dist.all_gather(list(gathered.split(ROWS)), rows_of(rank, ROWS[rank]), async_op=async_op)
    if async_op:
        work.wait()
    assert torch.equal(gathered, torch.cat([rows_of(r, ROWS[r]) for r in range(WORLD)]))


def check_uneven_reduce_scatter(rank: int, async_op: bool) -> None:
    contributions = [rows_of(rank, count) for count in ROWS]
    output = torch.full((ROWS[rank], 4), torch.nan)
    work = dist.reduce_scatter(output, contributions, async_op=async_op)
    if async_op:
        work.wait()
    assert torch.equal(output, torch.full((ROWS[rank], 4), 6.0))
    assert all(torch.equal(part, rows_of(rank, part.shape[0])) for part in contributions)


def check_even_lists(rank: int) -> None:
    parts = [torch.empty(2) for _ in range(WORLD)]
    dist.all_gather(parts, torch.full((2,), float(rank)))
    assert [part.tolist() for part in parts] == [[0, 0], [1, 1], [2, 2]]


def check_subgroup(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank > 0:
        parts = [torch.empty(1), torch.empty(3)]
        dist.all_gather(parts, torch.full((2 * rank - 1,), float(rank)), group=group)
        assert [part.tolist() for part in parts] == [[1], [2, 2, 2]]


def check_tensor_split_sizes(rank: int) -> None:
    """Rank r sends r + 1 rows to every rank."""
    sent = rows_of(rank, WORLD * (rank + 1))
    received = torch.empty(1 + 2 + 3, 4)
    dist.all_to_all_single(
        received,
        sent,
        output_split_sizes=torch.tensor([1, 2, 3]),
        input_split_sizes=torch.tensor([rank + 1] * WORLD),
    )
    assert received[:, 0].tolist() == [1, 2, 2, 3, 3, 3]


def run_rank(rank: int, folder: str) -> None:
    from megatron_ciera import cpu

    cpu.install()
    torch.set_num_threads(1)
    store = Path(folder, "store")
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD)
    for async_op in (False, True):
        check_uneven_gather(rank, async_op)
        check_uneven_reduce_scatter(rank, async_op)
    check_even_lists(rank)
    check_subgroup(rank)
    check_tensor_split_sizes(rank)
    dist.destroy_process_group()


def test_collectives_on_three_processes(tmp_path):
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), nprocs=WORLD)
