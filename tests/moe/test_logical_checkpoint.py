"""Expert numbers in checkpoint entries, and the parameters of every class of experts slot by slot."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

from megatron_ciera.moe.logical_checkpoint import relabel, save_logically
from megatron_ciera.moe.sites import families

MAP = [2, 0, 3, 1]


def tensor(slot, key="experts.linear_fc1.weight"):
    """An entry of layer 5 of 7, expert `slot` of 4, as Megatron makes it."""
    return ShardedTensor.from_rank_offsets(
        key, torch.full((3, 2), float(slot)), (0, 5, 7), (1, slot, 4), prepend_axis_num=2
    )


def test_tensors_get_the_expert_number_on_the_expert_axis():
    entries = relabel({f"local.{slot}": tensor(slot) for slot in (2, 3)}, 1, MAP.__getitem__, {})
    assert entries["local.2"].global_offset == (5, 3, 0, 0)
    assert entries["local.3"].global_offset == (5, 1, 0, 0)
    assert entries["local.2"].global_shape == (7, 4, 3, 2)
    assert torch.equal(entries["local.2"].data, torch.full((3, 2), 2.0))


def test_extra_state_follows():
    entry = ShardedObject("experts.linear_fc1._extra_state", b"", (7, 4), (5, 2))
    assert relabel({"x": entry}, 1, MAP.__getitem__, {})["x"].global_offset == (5, 3)


def test_factories_are_relabelled_in_what_they_build():
    """Gated units are split in two on saving, optimizer state included: its own data goes through the factory."""

    def build(key, data, replica_id, flattened_range):
        return [
            ShardedTensor.from_rank_offsets(key, half, (0, 2, 4), (1, part, 2), prepend_axis_num=1)
            for part, half in enumerate(data.chunk(2))
        ]

    factory = ShardedTensorFactory("experts.linear_fc1.weight", torch.zeros(4, 2), build, torch.cat)
    entry = relabel({"x": factory}, 0, MAP.__getitem__, {})["x"]
    entry.data = torch.arange(8.0).view(4, 2)
    assert [part.global_offset for part in entry.build()] == [(3, 0, 0), (3, 2, 0)]
    assert torch.equal(entry.build()[1].data, torch.arange(4.0, 8.0).view(2, 2))
    assert [part.global_offset[0] for part in factory.build()] == [2, 2]


def test_singleton_shards_have_the_number_in_the_key():
    entry = ShardedTensor.from_rank_offsets(
        "decoder.layers.2.mlp.experts.2.linear_fc1.weight", torch.zeros(2)
    )
    found = relabel({"x": entry}, 0, MAP.__getitem__, {"singleton_local_shards": True})["x"]
    assert found.key == "decoder.layers.2.mlp.experts.3.linear_fc1.weight"


def test_the_map_is_read_at_each_save():
    experts = torch.nn.Module()
    experts.sharded_state_dict = lambda prefix, sharded_offsets, metadata: {"x": tensor(2)}
    mapping = torch.arange(4)
    save_logically(experts, mapping)
    assert experts.sharded_state_dict("", ((0, 5, 7),), {})["x"].global_offset[1] == 2
    mapping.copy_(torch.tensor(MAP))
    assert experts.sharded_state_dict("", ((0, 5, 7),), {})["x"].global_offset[1] == 3


def site(experts, count):
    return SimpleNamespace(
        layer=SimpleNamespace(experts=experts), num_local_experts=count, layer_id="layer 0"
    )


def grouped(count, single):
    """Parameters named as TEGroupedMLP names them."""
    experts = torch.nn.Module()
    for linear, shape in (("linear_fc1", (6, 4)), ("linear_fc2", (4, 3))):
        module = torch.nn.Module()
        if single:
            module.weight = torch.nn.Parameter(torch.randn(count, *shape))
        else:
            for slot in range(count):
                setattr(module, f"weight{slot}", torch.nn.Parameter(torch.randn(shape)))
        setattr(experts, linear, module)
    return experts


def test_grouped_parameters_by_slot():
    experts = grouped(12, single=False)
    found = {family.name: family for family in families(site(experts, 12))}
    assert sorted(found) == ["linear_fc1.weight", "linear_fc2.weight"]
    weight = found["linear_fc1.weight"]
    assert weight.numel == 24
    assert torch.equal(weight.value(11), experts.linear_fc1.weight11.view(-1))
    weight.value(11).zero_()
    assert not experts.linear_fc1.weight11.any()


def test_one_grouped_parameter_for_all_slots():
    experts = grouped(4, single=True)
    found = {family.name: family for family in families(site(experts, 4))}
    assert torch.equal(found["linear_fc2.weight"].value(2), experts.linear_fc2.weight[2].reshape(-1))


def test_parameters_that_do_not_divide_over_slots_are_refused():
    experts = torch.nn.Module()
    experts.scale = torch.nn.Parameter(torch.zeros(5))
    with pytest.raises(ValueError, match=r"parameter scale of Module has shape \[5\], .* 4 local experts"):
        families(site(experts, 4))
