"""Which checkpoints are refused from what their common state says, before anything else is read."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_ciera.moe.stored import StoredCheckpoint, _optimizer_format, check_loadable
from megatron_ciera.transformer_engine import keeps_remainders
from placement.file import DECODER, LayerId, LayerPlacement, Placement


def placement(experts):
    layers = (LayerPlacement(LayerId(DECODER, 0), np.asarray(experts)),)
    return Placement(4, 2, 2, 2, layers, {"tokens": 64, "source": "test", "iteration": 1})


@pytest.mark.parametrize("applies_placement", [True, False])
def test_flattened_optimizer_state_is_refused(applies_placement):
    with pytest.raises(
        ValueError, match="fully_sharded_model_space, needs fully_reshardable or dp_reshardable"
    ):
        check_loadable(StoredCheckpoint(None, "fully_sharded_model_space", True), applies_placement)


def test_its_weights_alone_are_taken():
    check_loadable(StoredCheckpoint(None, "fully_sharded_model_space", False), True)


@pytest.mark.parametrize("stored_format", ["dp_reshardable", "dp_zero_gather_scatter"])
def test_state_by_slot_under_a_placement_needs_the_placement(stored_format):
    stored = StoredCheckpoint(placement([1, 0, 3, 2]), stored_format, True)
    check_loadable(stored, applies_placement=True)
    with pytest.raises(ValueError, match=f"{stored_format}, which stores optimizer state by slot"):
        check_loadable(stored, applies_placement=False)


@pytest.mark.parametrize(
    "stored",
    [
        StoredCheckpoint(placement([1, 0, 3, 2]), "fully_reshardable", True),
        StoredCheckpoint(placement([0, 1, 2, 3]), "dp_reshardable", True),
        StoredCheckpoint(placement([1, 0, 3, 2]), "dp_reshardable", False),
        StoredCheckpoint(None, "dp_reshardable", True),
    ],
    ids=["by expert", "contiguous", "weights alone", "no placement"],
)
def test_these_load_without_a_placement(stored):
    check_loadable(stored, applies_placement=False)


@pytest.mark.parametrize("stored_remainders", [True, False])
def test_masters_are_not_taken_for_remainders(stored_remainders):
    stored = StoredCheckpoint(None, "fully_reshardable", True, stored_remainders)
    check_loadable(stored, True, remainders=stored_remainders)
    check_loadable(StoredCheckpoint(None, None, False, stored_remainders), True, not stored_remainders)
    with pytest.raises(ValueError, match="resume with the optimizer flags that it was saved with"):
        check_loadable(stored, True, remainders=not stored_remainders)


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
