"""The Apex-shaped Adam: torch's numbers, one step a group, and a state that survives a checkpoint."""

import copy

import pytest
import torch

from megatron_ciera.cpu.adam import FusedAdam

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters(*sizes):
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def bits(tensors):
    return [tensor.detach().view(torch.int32).tolist() for tensor in tensors]


@pytest.mark.parametrize("adam_w_mode, reference", [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_steps_equal_torchs_bit_by_bit(adam_w_mode, reference):
    ours, theirs = parameters(7, 64), parameters(7, 64)
    optimizer = FusedAdam(ours, adam_w_mode=adam_w_mode, **SETTINGS)
    twin = reference(theirs, foreach=False, **SETTINGS)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        twin.step()
    assert bits(ours) == bits(theirs)


def test_step_is_kept_by_group_and_not_by_empty_groups():
    optimizer = FusedAdam([{"params": parameters(4)}, {"params": []}], **SETTINGS)
    set_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()
    optimizer.step()
    first, empty = optimizer.param_groups
    assert first["step"] == 2 and type(first["step"]) is int
    assert "step" not in empty
    assert set(optimizer.state[first["params"][0]]) == {"exp_avg", "exp_avg_sq"}


def test_resume_from_a_state_dict_continues_bit_by_bit():
    params = parameters(33)
    optimizer = FusedAdam(params, **SETTINGS)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    resumed_params = [torch.nn.Parameter(parameter.detach().clone()) for parameter in params]
    resumed = FusedAdam(resumed_params, **SETTINGS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for some, one in ((params, optimizer), (resumed_params, resumed)):
            set_gradients(some, step)
            one.step()
    assert bits(params) == bits(resumed_params)
    assert resumed.param_groups[0]["step"] == 6


def test_parameter_without_gradient_stays():
    params = parameters(4, 4)
    optimizer = FusedAdam(params, **SETTINGS)
    before = params[1].detach().clone()
    params[0].grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(params[1], before) and params[1] not in optimizer.state


@pytest.mark.parametrize("name", ["amsgrad", "capturable", "master_weights"])
def test_what_needs_the_gpu_kernel_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=True"):
        FusedAdam(parameters(4), **{name: True})
