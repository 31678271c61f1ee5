"""Process groups of token shuffling: communicators of its own, so that nothing waits behind its exchanges."""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ciera.errors import refuse


@dataclass(frozen=True)
class ShuffleGroups:
    """shuffle: the tensor-parallel ranks, which are the expert-parallel ones. stage: all ranks of this pipeline
    stage, which hold the same layers; its first rank fits their tables."""

    shuffle: dist.ProcessGroup
    stage: dist.ProcessGroup


def make_shuffle_groups() -> ShuffleGroups:
    """Makes the groups. Collective: every rank calls it once.

    Raises:
        ConfigurationError: on every rank, when tensor- and expert-parallel groups differ.
    """
    tensor = dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())
    expert = dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (tensor, expert, parallel_state.get_pipeline_model_parallel_rank()))
    for tensor_ranks, expert_ranks, _ in everyone:
        if tensor_ranks != expert_ranks:
            raise refuse(
                "--token-shuffle",
                f"tensor-parallel ranks {tensor_ranks} and expert-parallel ranks {expert_ranks}",
                "the same ranks in the same order",
                "Keep Megatron's default order of parallelisms, or leave out --token-shuffle.",
            )
    shuffle = stage = None
    for ranks in sorted({tuple(entry[0]) for entry in everyone}):
        made = dist.new_group(list(ranks))
        shuffle = made if dist.get_rank() in ranks else shuffle
    for number in sorted({entry[2] for entry in everyone}):
        ranks = [rank for rank, entry in enumerate(everyone) if entry[2] == number]
        made = dist.new_group(ranks)
        stage = made if dist.get_rank() in ranks else stage
    return ShuffleGroups(shuffle, stage)
