"""Process groups for moving experts: ranks that hold the same part of the same layers, over all experts."""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks over which experts move: every expert-parallel and expert-data-parallel coordinate once.

    members: index in `group` of (expert rank, expert data rank). stage: the ranks of this pipeline stage,
    which commit a layer together.
    """

    group: dist.ProcessGroup
    stage: dist.ProcessGroup
    members: dict[tuple[int, int], int]
    expert_rank: int
    data_rank: int

    @property
    def index(self) -> int:
        return self.members[self.expert_rank, self.data_rank]

    @property
    def data_size(self) -> int:
        return 1 + max(data for _, data in self.members)


def make_expert_group() -> ExpertGroup:
    """Makes the groups. Collective: every rank calls it once, in the same order."""
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    data_rank = parallel_state.get_expert_data_parallel_rank()
    stage_rank = parallel_state.get_pipeline_model_parallel_rank()
    mine = (stage_rank, parallel_state.get_expert_tensor_parallel_rank(), expert_rank, data_rank)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    by_position, by_stage = {}, {}
    for rank, (stage, tensor, expert, data) in enumerate(everyone):
        by_position.setdefault((stage, tensor), []).append((rank, (expert, data)))
        by_stage.setdefault(stage, []).append(rank)
    group = members = None
    for position in sorted(by_position):
        made = dist.new_group([rank for rank, _ in by_position[position]])
        if position == mine[:2]:
            group, members = made, {place: index for index, (_, place) in enumerate(by_position[position])}
    stage = None
    for key in sorted(by_stage):
        made = dist.new_group(by_stage[key])
        stage = made if key == stage_rank else stage
    return ExpertGroup(group, stage, members, expert_rank, data_rank)
