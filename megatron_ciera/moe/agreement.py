"""All ranks see the same file, or all stop."""

import torch.distributed as dist


def agree(what: str, value: str | None, failure: Exception | None, wanted: str) -> None:
    """Checks that no rank failed and that `value` (a short string) is the same everywhere. Collective.

    Raises:
        ValueError: on every rank, naming the first rank that failed or differs.
    """
    everyone = [None] * dist.get_world_size()
    reason = None if failure is None else str(failure)
    dist.all_gather_object(everyone, (value, reason))
    for rank, (_, why) in enumerate(everyone):
        if why:
            raise ValueError(f"{what}: rank {rank}: {why}") from failure
    for rank, (found, _) in enumerate(everyone):
        if found != everyone[0][0]:
            raise ValueError(f"{what}: rank {rank} found {found}, rank 0 found {everyone[0][0]}; {wanted}")
