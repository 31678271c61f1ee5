"""Comparing observed runs: equal is equal to the bit, and every kind of difference is found and named."""

import json
import sys

import pytest

from megatron_ciera import comparison_cli
from megatron_ciera.comparison import compare, observe_run


def run(folder, losses=(1.0, 0.5), norms=(2.0, 1.5), digests=("aa", "bb"), first=1):
    """A folder as MEGATRON_CIERA_OBSERVE leaves it, of two ranks."""
    folder.mkdir()
    records = [
        {"iteration": first + i, "losses": {"lm loss": loss}, "grad_norm": norm, "metrics": {}}
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    (folder / "iterations.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for rank, digest in enumerate(digests):
        (folder / f"parameters_rank{rank}.json").write_text(json.dumps({"0.weight": digest}))
    return folder


def test_equal_runs(tmp_path):
    found = compare(run(tmp_path / "a"), run(tmp_path / "b"))
    assert found.equal and found.bitwise_identical
    assert (found.iterations, found.parameters, found.loss_max_abs_diff) == (2, 2, 0.0)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"losses": (1.0, 0.5000001)}, "iteration 2, lm loss: 0.5 and 0.5000001"),
        ({"losses": (1.0, float("nan"))}, "iteration 2, lm loss: 0.5 and nan"),
        ({"norms": (2.0, 1.25)}, "iteration 2, gradient norm: 1.5 and 1.25"),
        ({"digests": ("aa", "bc")}, "final parameters: rank1, 0.weight"),
        ({"digests": ("aa",)}, "final parameters: digests of 2 and 1 ranks"),
    ],
)
def test_differences_are_named(tmp_path, change, text):
    found = compare(run(tmp_path / "a"), run(tmp_path / "b", **change))
    assert not found.equal and found.first_difference == text


def test_nan_in_both_is_equal(tmp_path):
    nan = {"losses": (1.0, float("nan"))}
    assert compare(run(tmp_path / "a", **nan), run(tmp_path / "b", **nan)).equal


def test_runs_that_cover_other_iterations_are_not_compared(tmp_path):
    with pytest.raises(ValueError, match="must cover the same, with --log-interval 1"):
        compare(run(tmp_path / "a"), run(tmp_path / "b", first=3))


def test_run_that_was_not_observed_is_named(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="b/iterations.jsonl: not found, .* launched through megatron_ciera"):
        compare(run(tmp_path / "a"), tmp_path / "b")


def test_what_an_earlier_run_observed_is_not_taken_for_this_one(tmp_path):
    folder = run(tmp_path / "a")
    assert observe_run([sys.executable, "-c", ""], folder, tmp_path / "log") == 0
    assert list(folder.iterdir()) == []


# What `comparison_cli` runs here: it writes what an observed run would, with the counts that its flags ask for.
TRAINING = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["MEGATRON_CIERA_OBSERVE"])
on = "--ciera" in sys.argv
metrics = {"ciera/coded_gathers": float("--few" not in sys.argv)} if on else {}
record = {"iteration": 1, "losses": {"lm loss": 1.0}, "grad_norm": 2.0, "metrics": metrics}
(folder / "iterations.jsonl").write_text(json.dumps(record) + chr(10))
(folder / "parameters_rank0.json").write_text(json.dumps({"0.weight": "aa"}))
with open(sys.argv[1], "a") as runs:
    runs.write(" ".join(sys.argv[2:]) + chr(10))
sys.exit("--cierra" in sys.argv)
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    return ["--", sys.executable, str(tmp_path / "train.py"), str(tmp_path / "runs")]


@pytest.mark.parametrize("flags", [["--with", "--ciera"], ["--with=--ciera"], ["--with", "--ciera --x"]])
def test_flags_in_one_string(tmp_path, capsys, command, flags):
    assert comparison_cli.main([*flags, "--output", str(tmp_path / "both"), *command]) == 0
    said = capsys.readouterr().out
    assert "equal over 1 iterations" in said
    assert f"report_run.py {tmp_path}/both/with --baseline {tmp_path}/both/without" in said
    assert (tmp_path / "runs").read_text().splitlines() == [flags[-1].removeprefix("--with="), ""]


@pytest.mark.parametrize("flags", ["--ciera --few", "--ciera"])
def test_a_run_that_compressed_nothing_proves_nothing(capsys, command, flags):
    status = comparison_cli.main(["--with", flags, *command])
    assert status == (2 if "--few" in flags else 0)
    assert ("proves nothing: no gather was compressed" in capsys.readouterr().err) == (status == 2)


def test_a_mistake_in_the_flags_shows_before_anything_else_is_trained(tmp_path, capsys, command):
    assert comparison_cli.main(["--with", "--cierra", *command]) == 2
    assert (tmp_path / "runs").read_text().splitlines() == ["--cierra"]
    assert "the run 'with' ended with exit code 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["a.log", "b.log"], "report_run.py LOG --baseline LOG"),
        (["--with", "--ciera"], "no command to run"),
        (["--with", "--ciera", "--iterations", "0", "--", "true"], "0 found, wanted an integer from 1"),
        (["--with", "--ciera", "--output", __file__, "--", "true"], "which is a file, needs a folder"),
    ],
)
def test_command_lines_that_cannot_work(capsys, arguments, text):
    with pytest.raises(SystemExit) as ended:
        comparison_cli.main(arguments)
    assert ended.value.code == 2 and text in capsys.readouterr().err
