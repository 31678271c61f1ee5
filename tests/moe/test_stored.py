"""Which checkpoints are refused from what their common state says, before anything else is read."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ciera.moe.stored import StoredCheckpoint, _optimizer_format, check_loadable, read_stored
from megatron_ciera.transformer_engine import keeps_remainders
from placement.file import DECODER, LayerId, LayerPlacement, Placement


def placement(experts):
    layers = (LayerPlacement(LayerId(DECODER, 0), np.asarray(experts)),)
    return Placement(4, 2, 2, 2, layers, {"tokens": 64, "source": "test", "iteration": 1})


BY_SLOT = ("dp_reshardable", "dp_zero_gather_scatter")
MIXED, CONTIGUOUS = [1, 0, 3, 2], [0, 1, 2, 3]


def saved_at_two(map_, optimizer_format, loads_optimizer=True, remainders=False):
    """A checkpoint of two expert-parallel ranks, as `read_stored` describes it."""
    stored = None if map_ is None else placement(map_)
    return StoredCheckpoint(stored, optimizer_format, loads_optimizer, 2, remainders)


@pytest.mark.parametrize("applies_placement", [True, False])
def test_flattened_optimizer_state_is_refused(applies_placement):
    with pytest.raises(
        ValueError, match="fully_sharded_model_space, needs fully_reshardable or dp_reshardable"
    ):
        check_loadable(saved_at_two(None, "fully_sharded_model_space"), applies_placement, 2)


def test_its_weights_alone_are_taken():
    check_loadable(saved_at_two(None, "fully_sharded_model_space", loads_optimizer=False), True, 2)


@pytest.mark.parametrize("expert_parallel_size", [1, 2, 4])
@pytest.mark.parametrize("applies_placement", [True, False])
@pytest.mark.parametrize("map_", [None, CONTIGUOUS, MIXED], ids=["no placement", "contiguous", "mixed"])
@pytest.mark.parametrize("stored_format", [*BY_SLOT, "fully_reshardable", None])
def test_state_by_slot_reaches_only_the_slots_it_came_from(
    stored_format, map_, applies_placement, expert_parallel_size
):
    """Every combination: state by expert goes anywhere; by slot only where each slot has the expert it had."""
    stored = saved_at_two(map_, stored_format)
    reason = None
    if stored_format in BY_SLOT:
        if expert_parallel_size != 2:
            reason = (
                f"--expert-model-parallel-size: found {expert_parallel_size}, needs 2 as in the checkpoint of "
                f"--load: its optimizer format {stored_format} stores state by slot, .* or add --no-load-optim"
            )
        elif map_ == MIXED and not applies_placement:
            reason = f"{stored_format}, which stores optimizer state by slot. Add --correlated-placement"
    if reason is None:
        check_loadable(stored, applies_placement, expert_parallel_size)
    else:
        with pytest.raises(ValueError, match=reason):
            check_loadable(stored, applies_placement, expert_parallel_size)
    check_loadable(
        saved_at_two(map_, stored_format, loads_optimizer=False), applies_placement, expert_parallel_size
    )


def test_state_by_slot_under_a_placement_of_another_size_is_refused():
    """Its placement would be dropped, and the state of every slot given to the contiguous expert."""
    stored = StoredCheckpoint(placement(MIXED), "dp_reshardable", True, expert_parallel_size=4)
    with pytest.raises(ValueError, match="placement is for expert-parallel size 2, needs 4"):
        check_loadable(stored, True, 4)


@pytest.mark.parametrize("stored_remainders", [True, False])
def test_masters_are_not_taken_for_remainders(stored_remainders):
    stored = saved_at_two(None, "fully_reshardable", remainders=stored_remainders)
    check_loadable(stored, True, 2, remainders=stored_remainders)
    weights = saved_at_two(None, None, loads_optimizer=False, remainders=stored_remainders)
    check_loadable(weights, True, 2, not stored_remainders)
    with pytest.raises(ValueError, match="resume with the optimizer flags that it was saved with"):
        check_loadable(stored, True, 2, remainders=not stored_remainders)


@pytest.mark.parametrize(
    ("changes", "optimizer_is_read"),
    [
        ({}, True),
        ({"finetune": True}, False),
        ({"no_load_optim": True}, False),
        ({"load": None, "pretrained_checkpoint": "there"}, False),
        ({"load": "nowhere", "pretrained_checkpoint": "there"}, False),
        ({"pretrained_checkpoint": "nowhere"}, True),
    ],
)
def test_what_is_read_of_the_checkpoint(monkeypatch, changes, optimizer_is_read):
    """Weights alone where Megatron finetunes, which it does whenever it falls back to --pretrained-checkpoint."""
    from megatron.training import checkpointing

    state = {"args": SimpleNamespace(expert_model_parallel_size=4, use_distributed_optimizer=False)}
    monkeypatch.setattr(checkpointing, "checkpoint_exists", lambda path: path == "there")
    monkeypatch.setattr(
        checkpointing, "_load_base_checkpoint", lambda load, args, rank0: (state, load, False, None)
    )
    run = {"load": "there", "pretrained_checkpoint": None, "finetune": False, "no_load_optim": False}
    stored = read_stored(SimpleNamespace(**{**run, **changes}))
    assert (stored.expert_parallel_size, stored.loads_optimizer) == (4, optimizer_is_read)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"fp8_recipe": "tensorwise"}, False),
        ({"main_params_dtype": "torch.float16"}, False),
        ({"bf16": False}, False),
        ({"use_precision_aware_optimizer": False}, False),
    ],
)
def test_who_keeps_remainders(changes, expected):
    precise = {"use_precision_aware_optimizer": True, "bf16": True, "main_params_dtype": "fp32"}
    assert keeps_remainders(SimpleNamespace(**{**precise, "fp8_recipe": "delayed", **changes})) is expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"use_distributed_optimizer": True, "ckpt_fully_parallel_save": True}, "fully_sharded_model_space"),
        ({"use_distributed_optimizer": True, "ckpt_fully_parallel_save": False}, "dp_zero_gather_scatter"),
        ({"use_distributed_optimizer": False}, None),
    ],
)
def test_format_of_checkpoints_that_name_none(arguments, expected):
    assert _optimizer_format({}, SimpleNamespace(**arguments)) == expected
