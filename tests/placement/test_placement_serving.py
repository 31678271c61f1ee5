"""Serving dumps in, serving placements out."""

import base64
import io
import json
import re

import numpy as np
import pytest
import yaml
from placement_traces import coupled_routing

from placement import LayerId, LayerPlacement, Placement, cli_evaluate, cli_fit
from placement.trace import open_trace
from placement.writers import sglang_text, tensorrt_llm_text

ROUTING = coupled_routing(layers=3, tokens=40)
BY_TOKEN = ROUTING.transpose(1, 0, 2)


def whole(reader):
    return np.concatenate(list(reader.blocks()), axis=1)


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("encode", [np.ndarray.tolist, lambda array: npy(array.astype(np.int16))])
def test_vllm_responses(tmp_path, encode):
    responses = [
        {
            "prompt_routed_experts": encode(BY_TOKEN[:10]),
            "choices": [{"routed_experts": encode(BY_TOKEN[10:25])}],
        },
        {"outputs": [{"routed_experts": encode(BY_TOKEN[25:])}], "prompt_routed_experts": None},
    ]
    path = tmp_path / "vllm.jsonl"
    path.write_text("\n".join(map(json.dumps, responses)))
    assert np.array_equal(whole(open_trace([path])), ROUTING)


def test_sglang_responses_need_their_shape(tmp_path):
    flat = base64.b64encode(BY_TOKEN.astype(np.int32).tobytes()).decode()
    path = tmp_path / "sglang.json"
    path.write_text(json.dumps([{"meta_info": {"routed_experts": flat}}]))
    reader = open_trace([path], serving_shape=(3, 2))
    assert np.array_equal(whole(reader), ROUTING) and reader.source_layers == "moe_order"
    with pytest.raises(ValueError, match="--serving-shape LAYERS TOPK"):
        open_trace([path])
    with pytest.raises(ValueError, match="240 values are not a multiple of --serving-shape 7 2"):
        open_trace([path], serving_shape=(7, 2))


def test_sglang_recorder_ids_are_slots(tmp_path):
    torch = pytest.importorskip("torch")
    to_logical = np.stack([np.random.default_rng(layer).permutation(16) for layer in range(3)])
    slots = np.stack([np.argsort(to_logical[layer])[ROUTING[layer]] for layer in range(3)])
    padded = np.full((3, 50, 8), -1)
    padded[:, :40, :2] = slots
    content = {
        "records": [{"topk_ids_of_layer": torch.tensor(padded)}],
        "last_physical_to_logical_map": torch.tensor(to_logical),
    }
    torch.save(content, tmp_path / "r.pt")
    assert np.array_equal(whole(open_trace([tmp_path / "r.pt"])), ROUTING)
    del content["last_physical_to_logical_map"]
    torch.save(content, tmp_path / "r.pt")
    with pytest.raises(ValueError, match="found records, wanted last_physical_to_logical_map beside"):
        open_trace([tmp_path / "r.pt"])


def test_load_only_dump_is_refused_with_the_reason(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"logical_count": torch.ones(4, 3, 16)}, tmp_path / "r.pt")
    with pytest.raises(
        ValueError, match="only expert loads .logical_count.: .*not which are selected together"
    ):
        open_trace([tmp_path / "r.pt"])


def loads_of(routing, num_experts=16):
    return np.stack([np.bincount(layer.reshape(-1), minlength=num_experts) for layer in routing])


@pytest.mark.parametrize("kind", ["npz", "pt", "two files", "steps", "dense layer"])
def test_loads_are_evaluated_for_load_alone(tmp_path, capsys, kind):
    routing = coupled_routing(layers=3, tokens=2048)
    np.savez(tmp_path / "r.npz", top_indices=routing)
    output = str(tmp_path / "p.json")
    options = ["--expert-parallel-size", "4", "--num-tokens", "2048", "--output", output]
    assert cli_fit.main([str(tmp_path / "r.npz"), *options]) == 0
    loads, paths = loads_of(routing), [tmp_path / "l0.npz"]
    if kind == "pt":
        torch, paths = pytest.importorskip("torch"), [tmp_path / "l.pt"]
        torch.save({"logical_count": torch.tensor(loads)[None]}, paths[0])
    elif kind == "two files":
        paths.append(tmp_path / "l1.npz")
        for path, part in zip(paths, np.split(routing, 2, axis=1), strict=True):
            np.savez(path, weight=loads_of(part))
    elif kind == "steps":
        np.savez(paths[0], logical_count=np.stack([loads_of(p) for p in np.split(routing, 4, axis=1)]))
    else:
        np.savez(paths[0], load=np.insert(loads, 1, 0, axis=0) if kind == "dense layer" else loads)
    capsys.readouterr()
    assert cli_evaluate.main([output, str(tmp_path / "r.npz"), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert cli_evaluate.main([output, *map(str, paths), "--json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert "not say which experts are selected together" in captured.err
    for found, wanted in zip([report, *report["layers"]], [expected, *expected["layers"]], strict=True):
        assert found.keys() == wanted.keys()
        assert found["rows_removed"] is None and found["locality"] is None
        assert found["rank_load"] == pytest.approx(wanted["rank_load"])
        assert found["rank_load_contiguous"] == pytest.approx(wanted["rank_load_contiguous"])
    assert cli_evaluate.main([output, *map(str, paths)]) == 0
    assert cli_evaluate.main([output, *map(str, paths), "--skip-tokens", "4"]) == 2


@pytest.mark.parametrize(
    "loads, message",
    [
        (np.ones((2, 16)), r"loads have shape \[2, 16\].*placement is of \[3, 16\]"),
        (np.ones((3, 8)), r"loads have shape \[3, 8\]"),
        (np.zeros((3, 16)), "all loads are 0"),
        (-np.ones((3, 16)), "wanted finite numbers from 0"),
        (np.ones(16), r"wanted \[layers, experts\]"),
    ],
)
def test_loads_of_another_model_are_refused(tmp_path, capsys, loads, message):
    placement = Placement.contiguous([LayerId("decoder", i) for i in range(3)], 16, 2, 4)
    placement.save(tmp_path / "p.json")
    np.savez(tmp_path / "l.npz", load=loads)
    assert cli_evaluate.main([str(tmp_path / "p.json"), str(tmp_path / "l.npz")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_damaged_and_empty_dumps(tmp_path):
    line = json.dumps({"routed_experts": BY_TOKEN.tolist()})
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([line, "{half", line]))
    reader = open_trace([path])
    assert whole(reader).shape == (3, 80, 2) and "1 damaged lines" in reader.notes[0]
    path.write_text("\n".join([line, "{half", "{half", line]))
    with pytest.raises(ValueError, match="2 of 4 lines are damaged"):
        whole(open_trace([path]))
    path.write_text('{"text": "hello"}')
    with pytest.raises(ValueError, match="no routed experts"):
        open_trace([path])
    path.write_text(json.dumps({"routed_experts": [[1, 2]]}))
    with pytest.raises(ValueError, match=r"shape \[1, 2\]"):
        open_trace([path])


def test_serving_formats():
    layers = (
        LayerPlacement(LayerId("decoder", 1), np.array([1, 0, 3, 2])),
        LayerPlacement(LayerId("decoder", 2), np.array([3, 2, 1, 0])),
        LayerPlacement(LayerId("mtp", 0), np.arange(4)),
    )
    placement = Placement(4, 2, 2, 2, layers)
    assert json.loads(sglang_text(placement)) == {
        "physical_to_logical_map": [[0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0]]
    }
    assert yaml.safe_load(tensorrt_llm_text(placement)) == {
        "initial_global_assignments": {1: [1, 0, 3, 2], 2: [3, 2, 1, 0]},
        "num_slots": 4,
        "layer_updates_per_iter": 0,
    }


@pytest.mark.parametrize("name, load", [("sglang", json.loads), ("tensorrt-llm", yaml.safe_load)])
def test_command_line_writes_serving_formats(tmp_path, name, load):
    np.savez(tmp_path / "r.npz", top_indices=coupled_routing(tokens=2048))
    options = ["--expert-parallel-size", "4", "--num-tokens", "2048", "--format", name]
    assert cli_fit.main([str(tmp_path / "r.npz"), *options, "--output", str(tmp_path / "out")]) == 0
    content = load((tmp_path / "out").read_text())
    rows = content.get("physical_to_logical_map") or list(content["initial_global_assignments"].values())
    assert [sorted(row) for row in rows] == [list(range(16))] * 2
