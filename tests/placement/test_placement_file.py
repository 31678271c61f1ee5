"""The placement file: what is written is read back, and nothing that does not fit is accepted."""

import json

import numpy as np
import pytest

from placement import LayerId, LayerPlacement, Placement, load_placement

IDENTITY = Placement.contiguous([LayerId("decoder", 1), LayerId("decoder", 3)], 8, 2, 4)


def document(**changes):
    return {**IDENTITY.to_document(), **changes}


def write(tmp_path, content):
    path = tmp_path / "p.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_round_trip(tmp_path):
    layers = (
        LayerPlacement(LayerId("decoder", 1), np.array([3, 0, 1, 2, 7, 6, 5, 4])),
        LayerPlacement(LayerId("mtp", 0), np.arange(8)),
    )
    fit = {"tokens": 64, "source": "x", "iteration": 7}
    Placement(8, 2, 4, 2, layers, fit=fit).save(tmp_path / "p.json")
    loaded = load_placement(tmp_path / "p.json")
    assert loaded.to_document() == Placement(8, 2, 4, 2, layers, fit=fit).to_document()
    assert loaded.to_document()["layers"][1]["block"] == "mtp"
    assert loaded.layers[0].logical_to_physical_map.tolist() == [1, 2, 3, 0, 7, 6, 5, 4]
    assert loaded.expert_to_rank(0).tolist() == [0, 1, 1, 0, 3, 3, 2, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


@pytest.mark.parametrize(
    "content, message",
    [
        ("{half", r"not JSON \(.*\); the file seems cut off"),
        ("", "the file seems cut off"),
        (json.dumps(document())[:-30], "the file seems cut off"),
        ("iteration 1", r"not JSON \(.*\); fit"),
        ("PK\x03\x04", r"found an .npz, .*give the placement's .json, .*\(p.json\)"),
        ("[1]", "format is 'list'"),
        (document(format="other"), "format is 'other'"),
        (document(version=2), "version is 2, this package reads 1"),
        (document(num_experts=0), "num_experts is 0, wanted a positive integer"),
        (document(topk="2"), "topk is '2', wanted a positive integer"),
        (document(expert_parallel_size=3), "num_experts 8 is not divisible by expert_parallel_size 3"),
        (document(ranks_per_node=3), "not a multiple of ranks_per_node 3"),
        (document(layers={}), "layers is missing or not a list"),
        (document(layers=[]), "no layers"),
        (document(source_layers="x"), "source_layers is 'x'"),
        (document(layers=[{"physical_to_logical_map": list(range(8))}]), "no integer 'layer'"),
        (document(layers=[{"layer": 1, "physical_to_logical_map": "x"}]),
         "layer 1: .*not a list of integers"),
        (document(layers=[{"layer": 1, "physical_to_logical_map": [0.5] * 8}]), "not a list of integers"),
        (document(layers=[{"layer": 1, "physical_to_logical_map": [0, 1]}]), "layer 1: .*has 2 entries"),
        (document(layers=[{"layer": 4, "physical_to_logical_map": [0, 0, *range(2, 8)]}]),
         r"layer 4: expert 0 is in several slots \[0, 1\]"),
        (document(layers=[{"layer": 4, "physical_to_logical_map": [*range(7), 8]}]),
         "layer 4: expert 8 is outside 0..7"),
        (document(layers=[{"layer": 4, "physical_to_logical_map": list(range(8))}] * 2),
         "layer 4 appears twice"),
        (document(layers=[{"layer": 4, "block": "x", "physical_to_logical_map": list(range(8))}]),
         "block 'x'"),
        (document(layers=[{"layer": -1, "physical_to_logical_map": list(range(8))}]), "layer -1"),
    ],
)  # fmt: skip
def test_refused_files(tmp_path, content, message):
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        Placement.load(path)
    assert str(path) in str(caught.value) and "fit_placement.py" in str(caught.value)


def test_a_folder_is_no_missing_file(tmp_path):
    with pytest.raises(ValueError, match="found a folder, wanted the .json in it"):
        Placement.load(tmp_path)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        Placement.load(tmp_path / "none.json")


def test_save_writes_nothing_for_an_invalid_placement(tmp_path):
    bad = Placement(4, 2, 2, 2, (LayerPlacement(LayerId("decoder", 0), np.array([0, 0, 1, 2])),))
    with pytest.raises(ValueError, match="layer 0: expert 0 is in several slots"):
        bad.save(tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []


def test_check_model_by_layer_number():
    maps = IDENTITY.check_model(8, 2, 4, moe_layers=[1, 3])
    assert sorted(maps) == [LayerId("decoder", 1), LayerId("decoder", 3)]
    for arguments, message in (
        ((16, 2, 4, [1, 3]), "num_experts is 8, the model has 16"),
        ((8, 1, 4, [1, 3]), "topk is 2, the model has 1"),
        ((8, 2, 2, [1, 3]), "expert_parallel_size is 4, the model has 2"),
        ((8, 2, 4, [1]), "layer 3 is not an MoE layer of the model"),
        ((8, 2, 4, [1, 3, 5]), "layer 5 is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            IDENTITY.check_model(*arguments)


def test_check_model_by_moe_order():
    layers = tuple(LayerPlacement(LayerId("decoder", i), np.roll(np.arange(4), i)) for i in range(3))
    placement = Placement(4, 2, 2, 2, layers, source_layers="moe_order")
    maps = placement.check_model(4, 2, 2, moe_layers=[2, 4, 6])
    assert maps[LayerId("decoder", 4)].tolist() == [3, 0, 1, 2]
    maps = placement.check_model(4, 2, 2, moe_layers=[2, 4], mtp_layers=[0])
    assert maps[LayerId("mtp", 0)].tolist() == [2, 3, 0, 1]
    assert len(placement.check_model(4, 2, 2, moe_layers=[2, 4, 6], mtp_layers=[0])) == 3
    with pytest.raises(ValueError, match="3 layers in MoE order, the model has 2 MoE layers"):
        placement.check_model(4, 2, 2, moe_layers=[2, 4])
