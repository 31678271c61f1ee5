"""A fit of prediction tables beside training, in a world of one process: what breaks is an answer, too."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ciera.flags import CieraConfig
from megatron_ciera.shuffle.groups import ShuffleGroups
from megatron_ciera.shuffle.run_fit import RunFit


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def run_fit(group, lines):
    chunk = SimpleNamespace(recorder=None)
    config = CieraConfig(token_shuffle=True, placement_fit_iteration=1, placement_refit_interval=0)
    made = RunFit(config, [chunk], [[0, 1, 2, 3]], ShuffleGroups(group, group), (8, 2), lines.append)
    made.before_step(1)
    return made, chunk.recorder


def finished(made, expert_to_rank):
    """What the run gets when the fit of iteration 1 is due."""
    assert all(made.after_step(iteration, expert_to_rank) is None for iteration in range(1, 6))
    return made.after_step(6, expert_to_rank)


def test_a_recording_that_cannot_be_read_changes_nothing_and_says_why(alone):
    lines = []
    made, recorder = run_fit(alone, lines)
    recorder.add(0, torch.zeros(4, 2))
    recorder.add(0, torch.zeros(4, 3))
    assert finished(made, {}) is None
    assert "tables of iteration 1: nothing changes: RuntimeError: Sizes of tensors" in lines[-1]
    assert made.was_fitted


def test_tables_of_the_layers_that_can_shuffle(alone):
    made, recorder = run_fit(alone, [])
    generator = torch.Generator().manual_seed(0)
    for layer in range(4):
        recorder.add(layer, torch.rand(64, 8, generator=generator).topk(2).indices)
    tables = finished(made, {layer: torch.arange(8).numpy() // 4 for layer in range(4)})
    assert list(tables) == [2] and tables[2].previous.shape == (8, 2)
