"""What Transformer Engine keeps, saved and taken back: real modules and a real optimizer, no GPU needed."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_ciera.moe.optimizer_state import let_remainders_load
from megatron_ciera.record.clock import on_gpu
from tests.launching import ROOT, launch, shared_gpu
from tests.moe.names import VARIABLE
from tests.te.te_runs import IS_INSTALLED

pytestmark = pytest.mark.skipif(
    not IS_INSTALLED, reason="needs Transformer Engine: scripts/install_transformer_engine.sh"
)


def test_experts_are_saved_and_loaded_by_number(tmp_path):
    """Weights and `_extra_state` of TEGroupedMLP, in both of Megatron's ways to number experts."""
    variables = {VARIABLE: "transformer_engine", **(shared_gpu() if on_gpu() else {})}
    worker = str(ROOT / "tests" / "te" / "te_checkpoint_worker.py")
    launch(tmp_path, 2, [tmp_path], script=(worker,), **variables).check()
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == 10
    for check, found in results.items():
        assert found == 16 if "number of" in check else found is True, check


def test_remainders_of_masters_come_back_from_fp32():
    """Every int16 there is, through the fp32 in which checkpoints by expert hold it."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    parameter = torch.nn.Parameter(torch.randn(2**16, dtype=torch.bfloat16))
    adam = FusedAdam([parameter], master_weights=True, use_decoupled_grad=True, store_param_remainders=True)
    adam.initialize_state(parameter, True)
    kept = torch.arange(-(2**15), 2**15).to(torch.int16)
    adam.set_scaled_state(parameter, "master_param", kept)
    saved = adam.get_unscaled_state(parameter, "master_param").float()
    with pytest.raises(AssertionError):
        adam.set_scaled_state(parameter, "master_param", saved)
    let_remainders_load(SimpleNamespace(optimizer=adam))
    adam.state[parameter]["master_param"].zero_()
    adam.set_scaled_state(parameter, "master_param", saved)
    assert torch.equal(adam.state[parameter]["master_param"], kept)
    adam.set_scaled_state(parameter, "exp_avg", saved)
    assert torch.equal(adam.state[parameter]["exp_avg"], saved)
