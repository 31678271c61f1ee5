"""The two scripts as people call them: only JSON on stdout, one-line errors, files whole or absent."""

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from placement_traces import coupled_routing, independent_routing, write_run

from megatron_ciera.param_gather.codec import stability_cli
from megatron_ciera.report import cli as report_cli
from megatron_ciera.simulator import cli as simulator_cli
from placement import Placement, cli_common, cli_evaluate, cli_fit, study

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
            "4096 tokens, asked for --skip-tokens 0 --num-tokens 5000; .*--moe-routing-trace-max-training-iters",
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
    assert re.search(message, captured.err) and "Traceback" not in captured.err and captured.out == ""
    assert captured.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["routing.npz"]


def test_balanced_routing_writes_no_file(tmp_path, capsys):
    np.savez(tmp_path / "r.npz", top_indices=independent_routing(4, 4096))
    assert fit(tmp_path / "r.npz", "--expert-parallel-size", 4, "--output", tmp_path / "p.json") == 2
    said = capsys.readouterr().err
    assert "no layer gains beyond chance" in said and "--num-tokens 8192, of a recording that leaves" in said
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


@pytest.mark.parametrize(
    "window, seen, evaluated",
    [
        ([], 2048, 4096),
        (["--skip-tokens", 100], 1948 + 500, 3996),
        (["--skip-tokens", 600, "--num-tokens", 1000], 1000, 1000),
        (["--skip-tokens", 2548], 0, 1548),
        (["--num-tokens", 500], 0, 500),
    ],
)
def test_evaluating_the_fit_tokens_is_said_first(npz, tmp_path, capsys, window, seen, evaluated):
    """Known again by the tokens themselves, whatever the name of their file."""
    output = tmp_path / "p.json"
    arguments = ["--expert-parallel-size", 4, "--skip-tokens", 500, "--num-tokens", 2048, "--output", output]
    assert fit(npz, *arguments) == 0
    renamed = npz.rename(tmp_path / "other.npz")
    capsys.readouterr()
    seen = min(seen, 2048)
    note = f"note: {seen} of these {evaluated} tokens are those that the placement was fitted on"
    assert evaluate(output, renamed, *window) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert (first.startswith(note) and first.endswith("--skip-tokens 2548")) == (seen > 0)
    assert evaluate(output, renamed, *window, "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) and (note in captured.err) == (seen > 0)


def test_other_tokens_of_the_same_name_are_not_noted(npz, tmp_path, capsys):
    output = tmp_path / "p.json"
    assert fit(npz, "--expert-parallel-size", 4, "--output", output) == 0
    np.savez(npz, top_indices=coupled_routing(2, 4096, seed=9))
    assert evaluate(output, npz) == 0
    assert "fitted on" not in capsys.readouterr().out


def test_a_megatron_trace_is_known_again_too(tmp_path, capsys):
    write_run(tmp_path / "t", ROUTING, steps=2, records=2, ranks=2, tokens=512)
    output = tmp_path / "p.json"
    arguments = ["--expert-parallel-size", 4, "--num-tokens", 2048, "--output", output]
    assert fit(tmp_path / "t", *arguments) == 0
    assert evaluate(output, tmp_path / "t" / ".." / "t") == 0
    assert "note: 2048 of these 4096 tokens" in capsys.readouterr().out
    document = json.loads(output.read_text())
    del document["fit"]["first_tokens"]
    output.write_text(json.dumps(document))
    assert evaluate(output, tmp_path / "t") == 0
    assert "note: 2048 of these 4096 tokens" in capsys.readouterr().out


def test_a_placement_without_its_tables_says_why_locality_is_missing(npz, tmp_path, capsys):
    output = tmp_path / "p.json"
    assert fit(npz, "--expert-parallel-size", 4, "--num-tokens", 2048, "--output", output) == 0
    assert evaluate(output, npz, "--skip-tokens", 2048) == 0
    assert "beside the placement" not in capsys.readouterr().out
    output.with_suffix(".npz").unlink()
    assert evaluate(output, npz, "--skip-tokens", 2048) == 0
    assert f"no {output.with_suffix('.npz')} beside the placement" in capsys.readouterr().out


OUTPUTS = {
    "fit": (cli_fit.main, ["{trace}", "--expert-parallel-size", "4"], ["--output", "--report"]),
    "study": (study.main, ["{trace}"], ["--plot"]),
    "report_run": (report_cli.main, ["none.log"], ["--output"]),
    "measure_stability": (stability_cli.main, ["none.npz", "none.npz"], ["--plot"]),
    "simulate": (simulator_cli.main, ["--config", "none.yaml"], ["--plot", "--timeline"]),
}


@pytest.mark.parametrize(
    "tool, flag", [(tool, flag) for tool, (_, _, flags) in OUTPUTS.items() for flag in flags]
)
@pytest.mark.parametrize(
    "path, message", [("folder", "found a folder, wanted the path of a file"), ("file/x", "Not a directory")]
)
def test_outputs_are_checked_before_any_work(npz, tmp_path, capsys, tool, flag, path, message):
    pytest.importorskip("matplotlib")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    main, words, _ = OUTPUTS[tool]
    with pytest.raises(SystemExit, match="2"):
        main([word.format(trace=npz) for word in words] + [flag, str(tmp_path / path)])
    assert f"argument {flag}: {tmp_path / path}: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tool, flag", [("fit", "--report"), ("report_run", "--output"), ("simulate", "--plot")]
)
def test_missing_matplotlib_is_said_before_any_work(npz, tmp_path, capsys, monkeypatch, tool, flag):
    monkeypatch.setattr(cli_common, "find_spec", lambda name: None)
    main, words, _ = OUTPUTS[tool]
    with pytest.raises(SystemExit, match="2"):
        main([word.format(trace=npz) for word in words] + [flag, str(tmp_path / "x")])
    found = capsys.readouterr().err
    assert f"argument {flag}:" in found and "megatron-ciera[plots]" in found and "'.[plots]'" in found


def test_an_output_that_the_tables_would_overwrite(npz, tmp_path, capsys):
    (tmp_path / "p.npz").mkdir()
    for name, message in (("q.npz", "name the placement .json"), ("p.json", "p.npz: found a folder")):
        with pytest.raises(SystemExit, match="2"):
            fit(npz, "--expert-parallel-size", 4, "--output", tmp_path / name)
        assert message in capsys.readouterr().err


def test_a_report_that_fails_leaves_the_placement(npz, tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(cli_fit, "write_report", fail)
    output = tmp_path / "p.json"
    arguments = [npz, "--expert-parallel-size", 4, "--output", output, "--report", tmp_path / "r.html"]
    assert fit(*arguments) == 2
    assert Placement.load(output) and output.with_suffix(".npz").exists()


def test_too_few_tokens_and_wrong_ids_are_told_apart(npz, tmp_path, capsys):
    assert fit(npz, "--expert-parallel-size", 4, "--num-tokens", 1) == 2
    assert "1 tokens select only 4 different experts" in capsys.readouterr().err
    np.savez(npz, top_indices=np.where(ROUTING == 3, 999, ROUTING))
    assert fit(npz, "--expert-parallel-size", 4) == 2
    assert "ids may be out of range" in capsys.readouterr().err


def test_a_file_of_another_kind_is_named(tmp_path, capsys):
    (tmp_path / "run.log").write_text("iteration 1")
    assert fit(tmp_path / "run.log", "--expert-parallel-size", 4) == 2
    assert f"trace {tmp_path / 'run.log'}: wanted Megatron's router_trace" in capsys.readouterr().err


def test_tables_of_another_fit_are_refused(npz, tmp_path, capsys):
    fits = [
        [npz, "--output", tmp_path / "p.json"],
        [npz, "--array", "later", "--output", tmp_path / "q.json"],
    ]
    for options in fits:
        assert fit(*options, "--expert-parallel-size", 4, "--num-tokens", 2048) == 0
    assert Placement.load(tmp_path / "p.json").digest != Placement.load(tmp_path / "q.json").digest
    assert evaluate(tmp_path / "p.json", npz, "--skip-tokens", 2048) == 0
    (tmp_path / "q.npz").rename(tmp_path / "p.npz")
    capsys.readouterr()
    assert evaluate(tmp_path / "p.json", npz, "--skip-tokens", 2048) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path / 'p.npz'}: found those of another placement than {tmp_path / 'p.json'}" in message


def test_an_output_never_takes_the_tables_of_another_placement(npz, tmp_path, capsys):
    options = [npz, "--expert-parallel-size", 4, "--num-tokens", 2048]
    assert fit(*options, "--output", tmp_path / "p.json") == 0
    tables = (tmp_path / "p.npz").read_bytes()
    capsys.readouterr()
    assert fit(*options, "--seed", 1, "--output", tmp_path / "p.txt") == 2
    assert f"p.npz, the place of those of {tmp_path / 'p.json'}, which" in capsys.readouterr().err
    assert not (tmp_path / "p.txt").exists()
    assert fit(*options, "--seed", 1, "--format", "tensorrt-llm", "--output", tmp_path / "p.yaml") == 0
    assert (tmp_path / "p.npz").read_bytes() == tables
    assert fit(*options, "--output", tmp_path / "p.json") == 0


def test_an_output_never_takes_the_place_of_its_trace(npz, tmp_path, capsys):
    recorded = npz.read_bytes()
    options = ["--expert-parallel-size", 4, "--num-tokens", 2048]
    for output, message in (("routing.json", "routing.npz, which holds something else"), ("routing.npz", "")):
        with contextlib.suppress(SystemExit):
            assert fit(npz, *options, "--output", tmp_path / output) == 2
        assert message in capsys.readouterr().err
    assert fit(npz, *options, "--format", "sglang", "--output", npz.with_suffix(".json")) == 0
    assert npz.read_bytes() == recorded
    with open(tmp_path / "lone.npz", "wb") as file:
        np.save(file, np.zeros(3))
    assert fit(npz, *options, "--output", tmp_path / "lone.json") == 2
    assert "lone.npz, which holds something else" in capsys.readouterr().err
    dump = tmp_path / "dump.json"
    dump.write_text("{}")
    assert fit(dump, *options, "--output", dump) == 2
    assert "this is the trace itself" in capsys.readouterr().err and dump.read_text() == "{}"


def test_swapped_arguments_and_files_beside_the_placement_are_named(npz, tmp_path, capsys):
    write_run(tmp_path / "t", ROUTING, steps=2, records=2, ranks=2, tokens=512)
    assert fit(npz, "--expert-parallel-size", 4, "--num-tokens", 2048, "--output", tmp_path / "p.json") == 0
    (tmp_path / "p.html").write_text("<!doctype html>")
    for given, message in (
        (tmp_path / "t", "found a routing trace, wanted a placement; give the placement first"),
        (tmp_path / "p.html", f"not JSON, wanted the placement itself; give {tmp_path / 'p.json'} beside it"),
    ):
        capsys.readouterr()
        assert evaluate(given, npz) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "files, ranks", [([], " of ranks 0-3,"), ([0], " of rank 0,"), ([0, 3], " of ranks 0, 3,")]
)
def test_the_ranks_read_and_few_tokens_are_said(tmp_path, capsys, files, ranks):
    write_run(tmp_path / "t", ROUTING, steps=2, records=1, ranks=4, tokens=512)
    traces = [tmp_path / "t" / f"router_trace_rank{rank}.jsonl" for rank in files] or [tmp_path / "t"]
    options = ["--expert-parallel-size", 4, "--output", tmp_path / "p.json"]
    assert fit(*traces, *options, "--num-tokens", 1023) == 0
    captured = capsys.readouterr()
    assert f"1023 fit tokens{ranks}" in captured.out
    assert "note: --num-tokens 1023: few to fit from" in captured.err
    assert fit(*traces, *options, "--num-tokens", 1024) == 0
    assert "few to fit from" not in capsys.readouterr().err
    assert Placement.load(tmp_path / "p.json").fit["source"] == str(
        traces[0] if len(traces) == 1 else tmp_path / "t"
    )


def test_layers_that_lose_on_other_tokens_are_named(npz, tmp_path, capsys):
    """In layer 1 of the evaluated tokens experts are coupled as they lie contiguously; in layer 0 as in the fit."""
    assert fit(npz, "--expert-parallel-size", 4, "--num-tokens", 2048, "--output", tmp_path / "p.json") == 0
    moved = ROUTING.copy()
    moved[1] = Placement.load(tmp_path / "p.json").layers[1].logical_to_physical_map[ROUTING[1]]
    np.savez(tmp_path / "moved.npz", top_indices=moved)
    capsys.readouterr()
    assert evaluate(tmp_path / "p.json", tmp_path / "moved.npz") == 0
    assert "note: layer 1: fewer rows removed than with contiguous experts" in capsys.readouterr().out
    few = ["--skip-tokens", 2048, "--num-tokens", 4]  # too few to say so
    for trace, options in ((npz, few[:2]), (tmp_path / "moved.npz", few)):
        assert evaluate(tmp_path / "p.json", trace, *options) == 0
        assert "fewer rows removed than" not in capsys.readouterr().out
