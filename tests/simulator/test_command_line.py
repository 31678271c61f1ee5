import json
from pathlib import Path

import pytest

from megatron_ciera.simulator import cli

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MI300X = str(CONFIGS / "coupling_top6_tp8_ep8_mi300x_1n.yaml")


def run(capsys, *words):
    code = cli.main([*map(str, words)])
    return code, *capsys.readouterr()


def test_json_is_one_object_with_a_split_that_adds_up(capsys):
    code, out, _ = run(
        capsys,
        "--config",
        MI300X,
        *("--gpus", "8,16", "--layers", 2, "--features", "stock,ciera,shuffle", "--json"),
    )
    assert code == 0
    document = json.loads(out)
    assert [(p["gpus"], p["features"]) for p in document["projections"]] == [
        (size, name) for size in (8, 16) for name in ("stock", "ciera", "shuffle")
    ]
    for entry in document["projections"]:
        assert sum(entry["split"].values()) == pytest.approx(entry["seconds"])
        assert entry["speedup"] >= 1 - 1e-12
    assert document["projections"][0]["speedup"] == 1


def test_table_plot_and_timeline(capsys, tmp_path):
    plot, timeline = tmp_path / "split.png", tmp_path / "timeline.json"
    code, out, _ = run(
        capsys,
        *("--config", CONFIGS / "tiny_cpu.yaml", "--gpus", "4", "--features", "stock,ciera+placement"),
        *("--plot", plot, "--timeline", timeline),
    )
    assert code == 0
    assert (
        "rows of ciera+placement: rows removed as in the expert-coupling paper for top-2" in out
        and "Not validated on hardware" in out
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    events = json.loads(timeline.read_text())["traceEvents"]
    assert any(event["name"] == "s0.f0.l0.dispatch" for event in events)


def test_layers_sequence_and_block_size_change_the_answer(capsys):
    def seconds(*words):
        given = ("--config", CONFIGS / "olmoe_1b_7b_a100_2n.yaml", "--gpus", 16, "--json")
        code, out, _ = run(capsys, *given, *words)
        assert code == 0
        return json.loads(out)["projections"][0]["seconds"]

    one, four = seconds("--layers", 1, "--features", "stock"), seconds("--layers", 4, "--features", "stock")
    assert one < four
    assert seconds("--layers", 4, "--features", "stock", "--seq-length", 4096) > four
    reuse = ("--layers", 4, "--features", "exponent-reuse+no-selection")
    assert seconds(*reuse, "--block-change-rate", 0.1) < seconds(*reuse, "--block-change-rate", "expert=0.9")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpus", "12"), "--gpus: found 12"),
        (("--layers", "99"), "--layers: found 99"),
        (("--features", "magic"), "--features: found magic"),
        (("--block-change-rate", "norm=1"), "--block-change-rate: found norm"),
        (("--block-change-rate", "expert=45"), "--block-change-rate: found 45, needs a share"),
        (("--gpus", "8,many"), "--gpus: found many"),
        (("--rows-removed", "45"), "--rows-removed: found 45.0, needs a share"),
        (("--rank-load", "0.5"), "--rank-load: found 0.5"),
        (("--efficiency", "0"), "--efficiency: found 0.0"),
        (("--stability", "nowhere.json"), "--stability: found nowhere.json"),
        (("--trace", "nowhere", "--layers", "2"), "--layers: found --trace beside it"),
        (
            ("--gather-ratio", "0.6", "--features", "ciera,exponent-reuse"),
            "--gather-ratio: found 0.6 for variants with delta and exponent-reuse",
        ),
    ],
)
def test_mistakes_are_named_without_a_traceback(capsys, words, message):
    code, out, err = run(capsys, "--config", MI300X, *words)
    assert (code, out) == (2, "")
    assert message in err
