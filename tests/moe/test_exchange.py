"""Splits are checked before the collective."""

import pytest
import torch
import torch.distributed as dist

from megatron_ciera.moe.exchange import all_to_all


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_rows_that_do_not_fit_the_splits_are_named(alone):
    """As with a replayed routing that lost ids: rank and splits are in the message, and nothing was sent."""
    with pytest.raises(ValueError, match=r"rank 0 has 3 entries to send, but the splits \[2\] add up to 2"):
        all_to_all(torch.zeros(3, 4), [2], [3], alone)


def test_empty_rows_take_part(alone):
    assert all_to_all(torch.zeros(0, 4), [0], [0], alone).shape == (0, 4)
