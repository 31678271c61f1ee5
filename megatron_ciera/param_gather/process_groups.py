"""Process groups of our own, made in one order on all ranks."""

from collections.abc import Iterable

import torch.distributed as dist


def make_own_groups(groups: Iterable) -> dict[tuple[int, ...], object]:
    """A new process group with the ranks of each of `groups`, by its global ranks in order.

    Collective over the whole world: every rank makes every group, in the order of their ranks, whatever groups it is
    in itself. Ranks may name different groups, and none.
    """
    mine = {tuple(dist.get_process_group_ranks(group)) for group in groups}
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(mine))
    wanted = sorted({ranks for named in everyone for ranks in named})
    made = {ranks: dist.new_group(list(ranks), pg_options=_urgent()) for ranks in wanted}
    return {ranks: made[ranks] for ranks in mine}


def _urgent():
    """Options for NCCL: a few bytes that everyone waits for go before large kernels that are queued already."""
    if dist.get_backend() != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
