"""Comparing observed runs: equal is equal to the bit, and every kind of difference is found and named."""

import argparse
import json
import shlex
import sys
from types import SimpleNamespace

import pytest

from megatron_ciera import comparison_cli
from megatron_ciera.comparison import compare, effects, observe_run


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


IDLE = {"--ciera": "in the warm-up", "--correlated-placement": "no fit"}


@pytest.mark.parametrize("kind", ["effect", "without_effect"])
@pytest.mark.parametrize(
    "first, second, flags, found",
    [
        ((), ("--ciera",), "--ciera", {"--ciera"}),
        ((), ("--ciera",), "", {"--ciera"}),  # from the command's own YAML
        (("--ciera",), (), "--ciera", set()),
        (("--correlated-placement",), ("--correlated-placement",), "--ciera", set()),  # not what is compared
        (("--ciera",), ("--ciera",), "--ciera-codec delta", {"--ciera"}),
    ],
)
def test_what_flags_did_or_did_not(tmp_path, kind, first, second, flags, found):
    folders = [run(tmp_path / name) for name in "ab"]
    for folder, idle in zip(folders, (first, second), strict=True):
        *before, last = (folder / "iterations.jsonl").read_text().splitlines()
        last = json.loads(last) | {kind: {flag: IDLE[flag] for flag in idle}}
        (folder / "iterations.jsonl").write_text("\n".join([*before, json.dumps(last)]))
    assert effects(*folders, flags.split())[kind] == {flag: IDLE[flag] for flag in found}


# What `comparison_cli` runs here: it writes what an observed run would, as its flags ask for.
TRAINING = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["MEGATRON_CIERA_OBSERVE"])
record = {"iteration": 1, "losses": {"lm loss": 1.0}, "grad_norm": 2.0, "metrics": {}}
if "--ciera" in sys.argv:
    record["effect"] = {"--ciera": "3 of 9 bytes sent"}
if "--few" in sys.argv:
    record["without_effect"] = {"--ciera": "all 3 gathers were in the warm-up"}
if "--other" in sys.argv:
    record["grad_norm"] = 3.0
if "--untrained" in sys.argv:
    print("megatron-ciera: nothing was trained: the checkpoint is at iteration 9")
if not {"--unlogged", "--untrained"} & set(sys.argv):
    (folder / "iterations.jsonl").write_text(json.dumps(record) + chr(10))
(folder / "parameters_rank0.json").write_text(json.dumps({"0.weight": "aa"}))
with open(sys.argv[1], "a") as runs:
    runs.write(" ".join(sys.argv[2:]) + chr(10))
if "--says" in sys.argv:
    sys.exit(sys.argv[sys.argv.index("--says") + 1])
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
    assert "equal over 1 iterations" in said and "\n  --ciera: 3 of 9 bytes sent\n" in said
    assert f"ciera-report-run {tmp_path}/both/with --baseline {tmp_path}/both/without --output" in said
    assert (tmp_path / "runs").read_text().splitlines() == [flags[-1].removeprefix("--with="), ""]


@pytest.mark.parametrize(
    "flags, status", [("--ciera", 0), ("--ciera --few", 2), ("--ciera --few --other", 1)]
)
def test_a_run_that_compressed_nothing_proves_nothing(capsys, command, flags, status):
    assert comparison_cli.main(["--with", flags, *command]) == status
    said = capsys.readouterr()
    assert ("--ciera had no effect: all 3 gathers were in the warm-up" in said.err) == (status == 2)
    assert ("comparison: equal" in said.out) == (status == 0)
    assert ("iteration 1, gradient norm: 2.0 and 3.0" in said.out) == (status == 1)


@pytest.mark.parametrize("program", ["ciera-report-run", "report_run.py"])
def test_the_command_for_a_page_is_the_one_beside_this(tmp_path, capsys, monkeypatch, command, program):
    typed = {"ciera-report-run": "ciera-loss-compare", "report_run.py": "loss_compare.py"}[program]
    monkeypatch.setattr(sys, "argv", [f"/some where/{typed}"])
    monkeypatch.setattr(comparison_cli.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert comparison_cli.main(["--with", "--ciera", "--output", str(tmp_path / "two runs"), *command]) == 0
    *_, words = capsys.readouterr().out.strip().partition("both runs on a page: ")
    words = [word for word in shlex.split(words) if word != sys.executable]
    runs = [str(tmp_path / "two runs" / name) for name in ("with", "without", "report.html")]
    assert words == [f"/some where/{program}", runs[0], "--baseline", runs[1], "--output", runs[2]]


def test_an_installed_command_for_a_page_goes_by_its_name(tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/ciera-loss-compare"])
    monkeypatch.setattr(comparison_cli.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert comparison_cli.main(["--with", "--ciera", "--output", str(tmp_path / "both"), *command]) == 0
    assert f"both runs on a page: ciera-report-run {tmp_path}/both/with" in capsys.readouterr().out


def test_json_says_what_the_flags_did(capsys, command):
    assert comparison_cli.main(["--with", "--ciera", "--json", *command]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["effect"] == {"--ciera": "3 of 9 bytes sent"} and found["without_effect"] == {}


def schedule(**settings):
    """Megatron's own, of no parameters."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    wanted = {
        **{"init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 80},
        **{"lr_decay_style": "cosine", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 80},
        **{"wd_incr_style": "constant", "use_checkpoint_opt_param_scheduler": False},
    }
    return OptimizerParamScheduler(SimpleNamespace(param_groups=[]), **wanted | settings)


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"lr_decay_steps": 40}, "total number of iterations 80 in the checkpoint and 40"),
        ({"wd_incr_steps": 40}, "total number of weight decay iterations 80 in the checkpoint and 40"),
        ({"max_lr": 2.0}, "learning rate 1.0 in the checkpoint and 2.0"),
        ({"lr_decay_style": "linear"}, "learning rate decay style cosine in the checkpoint and linear"),
    ],
)
@pytest.mark.parametrize("iterations", [[], ["--iterations", "10"]], ids=["", "with --iterations"])
def test_a_checkpoint_of_another_schedule_has_a_way_out(capsys, command, settings, text, iterations):
    with pytest.raises(AssertionError) as refused:
        schedule(**settings).load_state_dict(schedule().state_dict())
    torchrun_report = "torchrun's report\n" * 300
    says = shlex.join(["--says", f"AssertionError: {refused.value}\n{torchrun_report}"])
    assert comparison_cli.main([f"--with={says}", *iterations, *command]) == 2
    said = capsys.readouterr().err
    assert f"--load: found {text} in this run" in said
    assert "Add --use-checkpoint-opt_param-scheduler to the command" in said
    assert ("--train-iters" in said) == ("total number" in text)
    assert ("(--iterations 10)" in said) == bool(iterations and "total number" in text)


def test_the_way_out_is_one_for_megatron():
    from megatron.training.arguments import add_megatron_arguments

    assert comparison_cli._KEEP_SCHEDULE in add_megatron_arguments(argparse.ArgumentParser()).format_usage()
    schedule(lr_decay_steps=40, use_checkpoint_opt_param_scheduler=True).load_state_dict(
        schedule().state_dict()
    )


@pytest.mark.parametrize("first", [True, False], ids=["the first", "the second"])
def test_a_run_of_a_checkpoint_that_was_at_its_end(capsys, command, first):
    flags = ["--with", "--untrained"] if first else ["--with", "--ciera", "--without", "--untrained"]
    flags += ["--iterations", "4"] if first else []
    assert comparison_cli.main([*flags, *command]) == 2
    said = capsys.readouterr()
    name = "with" if first else "without"
    assert f"the run '{name}': nothing was trained: the checkpoint is at iteration 9" in said.err
    assert ("--iterations sets it" in said.err) == first
    assert ("leave --save out" in said.err) == (not first) and "equal" not in said.out


def test_a_run_that_logged_nothing_ends_the_comparison(tmp_path, capsys, command):
    assert comparison_cli.main(["--with", "--unlogged", *command]) == 2
    assert (tmp_path / "runs").read_text().splitlines() == ["--unlogged"]
    assert "give --log-interval 1" in capsys.readouterr().err


def test_a_mistake_in_the_flags_shows_before_anything_else_is_trained(tmp_path, capsys, command):
    assert comparison_cli.main(["--with", "--cierra", *command]) == 2
    assert (tmp_path / "runs").read_text().splitlines() == ["--cierra"]
    assert "the run 'with' ended with exit code 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["a.log", "b.log"], "ciera-report-run LOG --baseline LOG"),
        (["--with", "--ciera"], "no command to run"),
        (["--with", "--", "true"], "argument --with: expected one argument"),
        (["--with", "", "--", "true"], "found no flag, as --without"),
        (["--with=--ciera", "--without", "--ciera", "--", "true"], "found --ciera, as --without"),
        (["--with", "--ciera 'x", "--", "true"], "found --ciera 'x: No closing quotation"),
        (["--with", "--ciera", "--", "no-such-program"], "found no-such-program, needs a program"),
        (["--with", "--ciera", "--iterations", "0", "--", "true"], "0 found, wanted an integer from 1"),
        (["--with", "--ciera", "--output", __file__, "--", "true"], "which is a file, needs a folder"),
    ],
)
def test_command_lines_that_cannot_work(capsys, arguments, text):
    with pytest.raises(SystemExit) as ended:
        comparison_cli.main(arguments)
    assert ended.value.code == 2 and text in capsys.readouterr().err


def test_a_comparison_with_our_flags_switched_off(capsys, monkeypatch, command):
    monkeypatch.setenv("MEGATRON_CIERA_DISABLE", "1")
    with pytest.raises(SystemExit):
        comparison_cli.main(["--with", "--ciera", *command])
    assert "both runs would be stock. Unset it" in capsys.readouterr().err
