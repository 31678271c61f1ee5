"""measure_stability.py and bench_codec.py as a user calls them."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_cases import training_pair

from tests import warm

ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "decoder.layers.0.mlp.experts.linear_fc1.weight",
    "decoder.layers.0.mlp.router.weight",
    "output_layer.weight",
)


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*warm.python(), str(ROOT / "scripts" / script), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture
def snapshots(tmp_path):
    pairs = {name: training_pair(20_000, torch.bfloat16, seed=place) for place, name in enumerate(NAMES)}
    for place, stem in enumerate(("before", "after")):
        arrays = {name: pair[place].reshape(100, 200) for name, pair in pairs.items()}
        np.savez(tmp_path / f"{stem}.npz", **arrays)
        tensors = {
            name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            for name, array in arrays.items()
        }
        torch.save({"model": tensors, "optimizer": {"exp_avg": torch.zeros(7)}}, tmp_path / f"{stem}.pt")
        from safetensors.torch import save_file

        save_file(tensors, tmp_path / f"{stem}.safetensors")
        import torch.distributed.checkpoint as checkpoint

        checkpoint.save(
            tensors | {"optimizer.state.exp_avg": torch.zeros(7)}, checkpoint_id=tmp_path / stem, no_dist=True
        )
    return tmp_path


def test_stability_is_the_same_from_every_kind_of_snapshot(snapshots):
    reports = []
    for suffix in (".npz", ".pt", ".safetensors", ""):
        run = run_script(
            "measure_stability.py",
            str(snapshots / f"before{suffix}"),
            str(snapshots / f"after{suffix}"),
            "--json",
        )
        assert run.returncode == 0, run.stderr
        reports.append(json.loads(run.stdout))
    assert all(report == reports[0] for report in reports)
    report = reports[0]
    assert report["bitwise_exact"] is True
    assert set(report["classes"]) == {"expert", "router", "embedding"}
    assert report["total"]["values"] == 60_000 == sum(row["values"] for row in report["classes"].values())
    assert set(report["total"]["block_change_rate"]) == {"64", "512"}
    assert set(report["total"]["bits_per_value"]) == {"exponent_reuse", "delta", "delta_packed"}
    bits = report["total"]["bits_per_value"]
    assert bits["delta"] < bits["delta_packed"] < bits["exponent_reuse"] < 11.5


def test_stability_draws_a_picture_and_a_table(snapshots):
    run = run_script(
        "measure_stability.py",
        str(snapshots / "before.npz"),
        str(snapshots / "after.npz"),
        "--block-size",
        "256",
        "--plot",
        str(snapshots / "picture.png"),
    )
    assert run.returncode == 0, run.stderr
    assert "block 256" in run.stdout and "bit-exact" in run.stdout
    assert (snapshots / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_stability_refuses_snapshots_of_two_models(snapshots):
    np.savez(snapshots / "other.npz", weight=np.zeros(5, np.uint16))
    run = run_script("measure_stability.py", str(snapshots / "before.npz"), str(snapshots / "other.npz"))
    assert run.returncode != 0 and "hold different parameters" in run.stderr


def test_benchmark_reports_every_codec(snapshots):
    run = run_script(
        "bench_codec.py",
        str(snapshots / "before.npz"),
        str(snapshots / "after.npz"),
        "--sizes-mb",
        "0.05",
        "--device",
        "cpu",
        "--json",
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["parity"] is True and not report["skipped"]
    assert {(row["codec"], row["coder"]) for row in report["results"]} == {
        (codec, coder) for codec in ("delta", "exponent-reuse") for coder in ("ans", "packed")
    }
    assert all(row["encode_gb_s"] > 0 and row["decode_gb_s"] > 0 for row in report["results"])
    assert [row["interval"] for row in report["check"]["intervals"]] == list(range(1, 11))


def test_benchmark_refuses_what_it_would_code_wrongly(snapshots):
    single = str(snapshots / "single.npz")
    np.savez(single, weight=np.zeros(100, np.float32))
    run = run_script("bench_codec.py", single, single)
    assert run.returncode == 2 and "torch.float32, wanted bf16" in run.stderr
    same = [str(snapshots / "before.npz")] * 2
    run = run_script("bench_codec.py", *same, "--unchanged", "0.5", "--device", "cpu", "--sizes-mb", "0.05")
    assert run.returncode == 2 and "--unchanged 0.5: found 1.000" in run.stderr


def test_a_file_of_another_kind_is_named(tmp_path, capsys):
    """Exit code 2, not the 1 of a codec that lost a bit."""
    from megatron_ciera.param_gather.codec.stability_cli import main

    text = tmp_path / "notes.pt"
    text.write_text("no weights")
    assert main([str(text), str(text)]) == 2
    assert f"{text}: found a file that torch.load does not read" in capsys.readouterr().err
    assert main([str(tmp_path / "none.npz"), str(text)]) == 2
    assert "none.npz" in capsys.readouterr().err
