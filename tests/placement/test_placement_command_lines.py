"""The two scripts as people call them: only JSON on stdout, one-line errors, files whole or absent."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from placement_traces import coupled_routing, independent_routing, write_run

from placement import Placement, cli_evaluate, cli_fit

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ROUTING = coupled_routing(layers=2, tokens=4096)


@pytest.fixture
def npz(tmp_path):
    path = tmp_path / "routing.npz"
    np.savez(path, top_indices=ROUTING.astype(np.uint8), later=ROUTING[:, ::-1].astype(np.uint8))
    return path


def fit(*arguments):
    return cli_fit.main([str(argument) for argument in arguments])


def evaluate(*arguments):
    return cli_evaluate.main([str(argument) for argument in arguments])


def test_fit_and_evaluate_json(npz, tmp_path, capsys):
    output = tmp_path / "p.json"
    options = ["--expert-parallel-size", 4, "--num-tokens", 2048, "--output", output, "--json"]
    assert fit(npz, *options) == 0
    summary = json.loads(capsys.readouterr().out)
    assert set(summary) == {"output", "num_tokens", "expert_parallel_size", "layers", "seconds"}
    assert summary["output"] == str(output) and summary["num_tokens"] == 2048
    keys = {"rows_removed_contiguous", "rows_removed", "rank_load_contiguous", "rank_load"}
    assert set(summary["layers"][0]) == {"layer", "changed"} | keys
    placement = Placement.load(output)
    assert placement.source_layers == "moe_order"
    assert placement.fit["tokens"] == 2048 and placement.fit["source"] == "routing.npz"
    assert evaluate(output, npz, "--skip-tokens", 2048, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    locality = {"locality_contiguous", "locality"}
    assert set(report) == keys | locality | {"layers"} and set(report["layers"][0]) == keys | locality | {
        "layer"
    }
    assert report["rows_removed"] > report["rows_removed_contiguous"] + 0.1
    assert report["rows_removed"] == pytest.approx(np.mean([e["rows_removed"] for e in report["layers"]]))


def test_rows_only_leaves_shuffling_out(npz, tmp_path, monkeypatch):
    asked, fit_layers_itself = [], cli_fit.fit_layers

    def fit_layers(*arguments, for_shuffling, **options):
        asked.append(for_shuffling)
        return fit_layers_itself(*arguments, for_shuffling=for_shuffling, **options)

    monkeypatch.setattr(cli_fit, "fit_layers", fit_layers)
    options = [npz, "--expert-parallel-size", 4, "--num-tokens", 512, "--output", tmp_path / "p.json"]
    assert fit(*options) == fit(*options, "--rows-only") == 0
    assert asked == [True, False]


def test_scripts_run_from_a_clone(npz, tmp_path):
    output = tmp_path / "p.json"
    command = [sys.executable, SCRIPTS / "fit_placement.py", npz, "--expert-parallel-size", "4"]
    done = subprocess.run([*command, "--output", output], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "layer 1" in done.stdout and f"wrote {output}" in done.stdout
    command = [sys.executable, SCRIPTS / "evaluate_placement.py", output, npz, "--skip-tokens", "4000"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "mean" in done.stdout


def test_megatron_folder_with_stages(tmp_path):
    write_run(tmp_path / "t", ROUTING, steps=2, records=2, ranks=2, tokens=512, stages=2)
    output = tmp_path / "p.json"
    stages = ["--pipeline-model-parallel-size", 2]
    assert (
        fit(tmp_path / "t", "--expert-parallel-size", 4, *stages, "--output", output, "--num-tokens", 2048)
        == 0
    )
    assert [layer.layer_id.layer for layer in Placement.load(output).layers] == [0, 1]
    assert evaluate(output, tmp_path / "t", *stages, "--skip-tokens", 2048) == 0


@pytest.mark.parametrize(
    "options, message",
    [
        (["--expert-parallel-size", 5], "not divisible by --expert-parallel-size 5"),
        (
            ["--expert-parallel-size", 4, "--num-tokens", 5000],
            "4096 tokens, asked for --skip-tokens 0 --num-t",
        ),
        (["--expert-parallel-size", 4, "--array", "none"], "the file has top_indices, later"),
        (
            ["--expert-parallel-size", 4, "--pipeline-model-parallel-size", 2],
            "MoE layers in model order already",
        ),
        (
            ["--expert-parallel-size", 4, "--virtual-pipeline-model-parallel-size", 2],
            "record the trace without",
        ),
        (["--expert-parallel-size", 4, "--num-experts", 8], "out of range 0..7"),
    ],
)
def test_errors_are_one_line_and_leave_no_file(npz, tmp_path, capsys, options, message):
    assert fit(npz, *options, "--output", tmp_path / "p.json") == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert captured.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["routing.npz"]


def test_balanced_routing_writes_no_file(tmp_path, capsys):
    np.savez(tmp_path / "r.npz", top_indices=independent_routing(4, 4096))
    assert fit(tmp_path / "r.npz", "--expert-parallel-size", 4, "--output", tmp_path / "p.json") == 2
    assert "no layer gains beyond chance" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    "values, message",
    [
        (np.zeros((2, 8), dtype=int), r"shape \[2, 8\], wanted \[layers, tokens, topk\]"),
        (np.zeros((2, 8, 2)), "dtype float64, wanted integers"),
        (np.zeros((2, 0, 2), dtype=int), "empty"),
    ],
)
def test_arrays_that_are_no_traces(tmp_path, capsys, values, message):
    np.savez(tmp_path / "r.npz", top_indices=values)
    assert fit(tmp_path / "r.npz", "--expert-parallel-size", 4) == 2
    assert re.search(message, capsys.readouterr().err)


def test_half_written_npz(npz, tmp_path, capsys):
    data = npz.read_bytes()
    npz.write_bytes(data[: len(data) // 2])
    assert fit(npz, "--expert-parallel-size", 4) == 2
    assert "damaged or half-written" in capsys.readouterr().err


def test_load_only_file_says_why(tmp_path, capsys):
    np.savez(tmp_path / "r.npz", logical_count=np.ones((3, 2, 16)))
    assert fit(tmp_path / "r.npz", "--expert-parallel-size", 4) == 2
    assert "not which are selected together" in capsys.readouterr().err


def test_evaluating_another_model_is_refused(npz, tmp_path, capsys):
    output = tmp_path / "p.json"
    assert fit(npz, "--expert-parallel-size", 4, "--output", output) == 0
    for name, routing, message in (
        ("layers", coupled_routing(3), "2 layers, the trace has 3"),
        ("topk", coupled_routing(2, topk=3), "topk 3, the placement 2"),
        ("experts", coupled_routing(2, num_experts=32), "out of range 0..15"),
    ):
        np.savez(tmp_path / f"{name}.npz", top_indices=routing)
        capsys.readouterr()
        assert evaluate(output, tmp_path / f"{name}.npz") == 2
        assert message in capsys.readouterr().err
    assert evaluate(tmp_path / "none.json", npz) == 2


def test_evaluating_the_fit_tokens_is_noted(npz, tmp_path, capsys):
    output = tmp_path / "p.json"
    assert fit(npz, "--expert-parallel-size", 4, "--num-tokens", 2048, "--output", output) == 0
    capsys.readouterr()
    assert evaluate(output, npz, "--skip-tokens", 100) == 0
    assert "were fitted on" in capsys.readouterr().err
    assert evaluate(output, npz, "--skip-tokens", 2048) == 0
    assert capsys.readouterr().err == ""
