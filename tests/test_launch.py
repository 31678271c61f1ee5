"""Launching for real: what stops a run, on every rank and without framework tracebacks, and what changes nothing."""

import json
import os
import re
from pathlib import Path

import pytest

from megatron_ciera import observe
from tests.launching import ROOT, SCRIPT, TINY, launch, without

PLAIN = str(ROOT / "tests" / "plain_megatron.py")


@pytest.fixture(scope="module")
def other_host(tmp_path_factory):
    """A checkout whose Megatron-Core is of a version that we do not know, with a script beside it."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "__init__.py").write_text('__version__ = "0.20.0"\n')
    (folder / "pretrain_gpt.py").write_text("raise SystemExit('the script must not start')\n")
    return folder / "pretrain_gpt.py"


def yaml_file(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(text)
    return str(folder / "run.yaml")


STOPPED = {
    "without distributed optimizer": (
        [*without(TINY, "--use-distributed-optimizer"), "--ciera"],
        "--ciera: found no --use-distributed-optimizer",
    ),
    "tensor parallel without sequence parallel": (
        [*TINY, "--tensor-model-parallel-size", "2", "--ciera"],
        "needs --sequence-parallel",
    ),
    "world that does not fit": (
        [*TINY, "--pipeline-model-parallel-size", "3", "--ciera"],
        "found 2 processes, needs a multiple of 3",
    ),
    "dedup with allgather": (
        [
            *without(TINY, "--moe-token-dispatcher-type"),
            "--expert-model-parallel-size",
            "2",
            "--dedup-dispatch",
        ],
        "--dedup-dispatch: found --moe-token-dispatcher-type allgather",
    ),
    "token shuffling with nothing to shuffle": (
        [
            *TINY,
            *(
                "--tensor-model-parallel-size",
                "2",
                "--sequence-parallel",
                "--expert-model-parallel-size",
                "2",
            ),
            *("--expert-tensor-parallel-size", "1", "--token-shuffle"),
        ],
        "--token-shuffle: found --num-layers 2 with 2 MoE layers, needs four layers or more",
    ),
    "yaml-cfg beside our flags": (
        [*TINY, "--yaml-cfg", "some.yaml", "--ciera"],
        "--yaml-cfg: found --ciera beside it",
    ),
    "a misspelled flag": (
        [*TINY, "--ciera", "--ciera-warmup-iter", "2", "--num-layer=3"],
        "--ciera-warmup-iter 2 --num-layer=3. Did you mean --ciera-warmup-iters, --num-layers? --help lists",
    ),
    "a value that is no choice": (
        [*TINY, "--ciera", "--ciera-codec", "zip"],
        "argument --ciera-codec: invalid choice: 'zip' (choose from",
    ),
    "a trace where a file is": (
        [*TINY, "--ciera-record", __file__],
        f"--ciera-record: found {__file__}, which is a file, needs a folder",
    ),
    "a placement that is a folder": (
        [
            *TINY,
            *("--expert-model-parallel-size", "2", "--correlated-placement", "--placement-file", str(ROOT)),
        ],
        f"--placement-file: found {ROOT}, which is a folder, needs a file",
    ),
    "an assertion of Megatron": (
        [*TINY, "--ciera", "--overlap-param-gather"],
        "Megatron refuses these flags",
    ),
}


@pytest.mark.parametrize("case", STOPPED)
def test_stops_on_every_rank_with_one_message(tmp_path, case):
    flags, message = STOPPED[case]
    run = launch(tmp_path, 2, flags, timeout=120)
    assert run.returncode != 0
    torchruns_report = run.output.removeprefix(run.said)
    assert message in run.said and message in torchruns_report
    assert run.said.count("megatron-ciera: error") == torchruns_report.count("megatron-ciera: error") == 1
    assert "new message format" not in run.output  # torchrun's warning of a file in a form of its own
    assert run.tracebacks == 0 and "usage:" not in run.output
    assert not (tmp_path / "iterations.jsonl").exists()


@pytest.mark.parametrize("does", [False, True], ids=["without", "with"])
def test_a_run_says_which_flags_had_no_effect(tmp_path, does):
    ours = ["--ciera", "--correlated-placement"]
    if does:
        ours += [
            "--ciera-warmup-iters",
            "2",
            "--placement-file",
            reversed_placement(tmp_path / "placement.json"),
        ]
    run = launch(tmp_path, 2, [*TINY, "--expert-model-parallel-size", "2", *ours]).check()
    *before, last = run.iterations
    assert not any("without_effect" in record for record in before)
    found = last.get("without_effect", {})
    assert set(found) == (set() if does else {"--ciera", "--correlated-placement"})
    assert set(last["effect"]) == {"--ciera", "--correlated-placement", "--dedup-dispatch"}
    for flag, what in last["effect"].items():
        assert f"megatron-ciera: {flag}: {what}\n" in run.output
    sent, stock = map(int, re.match(r"(\d+) of (\d+) rows sent", last["effect"]["--dedup-dispatch"]).groups())
    assert sent == sum(observe.metric(record, "moe/rows_sent") for record in run.iterations) < stock
    layers = "2 of 2" if does else "0 of 2"
    assert (
        last["effect"]["--correlated-placement"]
        == f"experts lie otherwise than contiguously in {layers} layers"
    )
    for flag, why in found.items():
        assert f"megatron-ciera: {flag} had no effect: {why}" in run.output
    text = re.search(
        r"(\d+) gathers compressed, (\d+) raw \((\d+) in the warm-up, 0 by selection\)", run.output
    )
    compressed, raw, warm_up = map(int, text.groups())
    assert raw >= warm_up > 0 and (compressed > 0) == does and (raw == warm_up or does)


@pytest.mark.parametrize("flags", [[], ["--ciera"]], ids=["stock", "with a flag"])
def test_a_folder_for_observing_that_cannot_be_made(tmp_path, flags):
    path = f"{__file__}/below"
    run = launch(tmp_path, 2, [*TINY, *flags], timeout=120, MEGATRON_CIERA_OBSERVE=path)
    assert run.returncode != 0 and run.tracebacks == 0
    assert f"MEGATRON_CIERA_OBSERVE: found {path} below {__file__}, which is a file" in run.output


def test_unknown_yaml_key(tmp_path):
    config = yaml_file(tmp_path / "config", "megatron: {num-layer: 2, ciera: true}")
    run = launch(tmp_path, 2, [*TINY, "--config", config], timeout=120)
    assert run.returncode != 0
    assert "unknown key 'num-layer'" in run.output and "Did you mean 'num-layers'" in run.output
    assert run.tracebacks == 0


def test_megatron_version_out_of_range(tmp_path, other_host):
    run = launch(tmp_path, 2, TINY, script=("-m", "megatron_ciera", str(other_host)), timeout=120)
    assert run.returncode != 0
    assert "found version 0.20.0" in run.output and "needs >=0.19,<0.20" in run.output
    assert "must not start" not in run.output and run.tracebacks == 0


def test_no_script(tmp_path):
    run = launch(tmp_path, 1, [], script=("-m", "megatron_ciera"), timeout=60)
    assert run.returncode != 0 and run.tracebacks == 0
    assert "found no training script" in run.output and "path/to/pretrain_gpt.py" in run.output


def test_missing_script(tmp_path):
    run = launch(tmp_path, 1, [], script=("-m", "megatron_ciera", "no/such/pretrain_gpt.py"), timeout=60)
    assert run.returncode != 0 and "no such file" in run.output and run.tracebacks == 0


def test_a_checkpoint_worker_without_the_cpu_layer(tmp_path):
    """On CPU the worker of an upstream script would end at once, and training would wait for it for ever."""
    flags = [*TINY, "--save", tmp_path / "saved", "--async-save", "--use-persistent-ckpt-worker"]
    run = launch(tmp_path, 2, flags, script=("-m", "megatron_ciera", SCRIPT), timeout=120)
    assert run.returncode != 0 and run.tracebacks == 0
    assert "--use-persistent-ckpt-worker: found it set, without a GPU" in run.output
    assert run.said.count("megatron-ciera: error") == 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Megatron as it is, started without our launcher."""
    flags = [*TINY, "--expert-model-parallel-size", "2"]
    return launch(tmp_path_factory.mktemp("plain"), 2, flags, script=(PLAIN,)).check()


@pytest.mark.parametrize(
    ("flags", "environment"),
    [([], {}), (["--ciera", "--correlated-placement"], {"MEGATRON_CIERA_DISABLE": "1"})],
    ids=["no flag", "disabled"],
)
def test_nothing_changes(tmp_path, plain, flags, environment):
    run = launch(tmp_path, 2, [*TINY, "--expert-model-parallel-size", "2", *flags], **environment).check()
    assert run.iterations == plain.iterations
    assert run.parameters == plain.parameters
    assert "attached:" not in run.output
    said = "MEGATRON_CIERA_DISABLE=1: nothing attached; ignored: --ciera --correlated-placement"
    assert run.output.count(said) == bool(environment)


def test_nothing_is_wrapped_without_flags(parse_flags, monkeypatch):
    from megatron.training import arguments, training

    monkeypatch.delenv("MEGATRON_CIERA_OBSERVE", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    before = {name: value for name, value in vars(training).items() if callable(value)}
    from megatron_ciera import cpu

    words, _ = cpu.default_arguments(TINY)
    arguments.validate_args(parse_flags(words))
    assert {name: value for name, value in vars(training).items() if callable(value)} == before


@pytest.mark.skipif(
    "MEGATRON_LM_PATH" not in os.environ,
    reason="set MEGATRON_LM_PATH to a Megatron-LM checkout of core_v0.19.0",
)
@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (2, "--expert-model-parallel-size 2"),
        (
            4,
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 1",
        ),
    ],
)
def test_upstream_script_unmodified(tmp_path, processes, parallel):
    upstream = Path(os.environ["MEGATRON_LM_PATH"]) / "pretrain_gpt.py"
    flags = [*TINY, *parallel.split()]
    script = ("-m", "megatron_ciera", str(upstream))
    ours = ["--ciera", "--ciera-warmup-iters", "2"]
    placed = ["--correlated-placement", "--placement-file", reversed_placement(tmp_path / "placement.json")]
    stock = launch(tmp_path / "stock", processes, flags, script=script).check()
    ciera = launch(tmp_path / "ciera", processes, [*flags, *ours], script=script).check()
    both = launch(tmp_path / "both", processes, [*flags, *ours, *placed], script=script).check()
    for run in (ciera, both):
        assert f"from {upstream.parent}/megatron/core" in run.output
    assert [r["losses"] for r in ciera.iterations] == [r["losses"] for r in stock.iterations]
    assert ciera.parameters == stock.parameters
    # Top-2 sums two terms, in any order alike: the first forward pass has the same bits.
    assert both.iterations[0]["losses"]["lm loss"] == stock.iterations[0]["losses"]["lm loss"]
    metrics = both.iterations[-1]["metrics"]
    assert metrics["moe/rows_sent"] < metrics["moe/rows_stock"]


def reversed_placement(path: Path) -> str:
    """A placement for TINY with the experts in reverse order, so that every one of them moves."""
    layers = [{"layer": layer, "physical_to_logical_map": list(range(7, -1, -1))} for layer in range(2)]
    header = {"format": "megatron-ciera-placement", "version": 1, "num_experts": 8, "topk": 2}
    shape = {"expert_parallel_size": 2, "ranks_per_node": 2}
    fit = {"tokens": 4096, "source": "test", "iteration": None}
    path.write_text(json.dumps({**header, **shape, "fit": fit, "layers": layers}))
    return str(path)
