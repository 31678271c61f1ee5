"""Recorded traces: read back, replayed as they were, and on another cluster by hand."""

import json
from pathlib import Path

import pytest
from replay_traces import CLUSTER, write

from megatron_ciera.errors import ConfigurationError
from megatron_ciera.simulator import cli, gather
from megatron_ciera.simulator.features import ChangeRates, parse_features
from megatron_ciera.simulator.hardware import Hardware
from megatron_ciera.simulator.replay import RECORDED, Target, replay, replay_as_recorded
from megatron_ciera.simulator.trace import read_trace

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GPU = Hardware(1e30, 1e30, 1e30, 0.0, encode=512.0, decode=256.0, codec_launch=0.0)
RATES = ChangeRates({"dense": 4.0, "expert": 4.0}, {"dense": 1.0, "expert": 1.0})


def target(features=RECORDED, gpus=4, cluster=CLUSTER):
    return Target(cluster, GPU, features, RATES, gpus)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "cut off"])
def test_as_recorded_is_the_recorded_time(tmp_path, closed):
    trace = read_trace(write(tmp_path, closed=closed))
    assert trace.typical().seconds == 6
    assert replay_as_recorded(trace) == 6


def test_on_another_cluster_by_hand(tmp_path):
    result = replay(read_trace(write(tmp_path)), target())
    at = {span.op.key: (span.start, span.end) for span in result.spans}
    # Expert ranks 0 and 1 are on one node: 512 of 1,024 bytes leave, at 1,024 bytes/s.
    assert at["0.all_to_all"] == (1.0, 1.5)
    # 1/8 s to notice, 3/8 s of work. Then four ranks on two nodes: 384 bytes inside, 192 over each NIC.
    assert at["1.reduce_scatter"] == (2.0, 2.75)
    # Expert data: every second rank, so one a node: 256 bytes at 256 bytes/s.
    assert at["2.all_gather"] == (4.0, 5.0)
    assert result.seconds == 5.25
    assert result.split == {"compute": 3.75, "all_to_all": 0.5, "param_gather": 1.0}


def test_more_gpus_grow_the_data_groups_only(tmp_path):
    result = replay(read_trace(write(tmp_path)), target(gpus=8))
    at = {span.op.key: span.end - span.start for span in result.spans}
    assert at["0.all_to_all"] == 0.5
    assert at["1.reduce_scatter"] == 512 * 7 / 8 / 2 / 256
    assert at["2.all_gather"] == 512 * 3 / 4 / 256


def test_codec_by_hand(tmp_path):
    result = replay(read_trace(write(tmp_path)), target(parse_features("ciera+no-selection")))
    at = {span.op.key: (span.start, span.end) for span in result.spans}
    # 256 values, half of them ours: 1/4 s to encode, 64 bytes to receive, 1/2 s to decode.
    assert at["2.0.encode"] == (4.0, 4.25)
    assert at["2.all_gather.0"] == (4.25, 4.5)
    assert at["2.0.decode"] == (4.5, 5.0)
    assert result.gather_ratio == 0.25


def test_pieces_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "_LEAST_VALUES", 64)
    result = replay(read_trace(write(tmp_path)), target(parse_features("ciera+no-selection")))
    at = {span.op.key: (span.start, span.end) for span in result.spans}
    # Two pieces of 64 own values: 1/8 s to encode, 1/8 s on the wire, 1/4 s to decode, each beside the others.
    assert at["2.1.encode"] == (4.125, 4.25)
    assert at["2.all_gather.0"] == (4.125, 4.25)
    assert at["2.all_gather.1"] == (4.25, 4.375)
    assert at["2.0.decode"] == (4.25, 4.5)
    assert at["2.1.decode"] == (4.5, 4.75)
    assert "2.2.encode" not in at


def test_deduplication_sends_fewer_rows(tmp_path):
    trace = read_trace(write(tmp_path))
    result = replay(trace, target(parse_features("dedup")))
    sent = next(span.end - span.start for span in result.spans if span.op.kind == "all_to_all")
    # 8 experts on 2 ranks, top-2: 2 (1 - (4 × 3) / (8 × 7)) = 11/7 rows instead of 2.
    assert sent == pytest.approx(0.5 * (11 / 7) / 2)


@pytest.mark.parametrize(
    ("features", "gpus", "message"),
    [("ciera", 4, "recorded with --ciera"), ("dedup", 6, "--gpus: found 6"), ("dedup", 3, "--gpus: found 3")],
)
def test_what_cannot_be_projected_is_refused(tmp_path, features, gpus, message):
    trace = read_trace(write(tmp_path, features=["ciera"]))
    with pytest.raises(ConfigurationError, match=message):
        replay(trace, target(parse_features(features), gpus))


@pytest.mark.parametrize("settings", [{"bf16": False}, {"bf16": True, "fp8_param_gather": True}])
def test_codecs_are_counted_for_gathers_in_bf16_alone(tmp_path, settings):
    trace = read_trace(write(tmp_path, **settings))
    with pytest.raises(
        ConfigurationError, match="--features: found ciera on a trace .* in another precision"
    ):
        replay(trace, target(parse_features("ciera")))
    for features in (RECORDED, parse_features("dedup")):
        replay(trace, target(features))


def test_fp8_products_are_in_a_trace(tmp_path, capsys):
    """The config may say so then, and the codec is still counted: parameters are gathered in bf16."""
    config = tmp_path / "c.yaml"
    config.write_text((CONFIGS / "tiny_cpu.yaml").read_text().replace("bf16: true", "fp8-format: hybrid"))
    words = ["--config", str(config), "--gpus", "4"]
    assert cli.main(words) == 2
    assert "--fp8-format: found hybrid, needs a run in bf16 in the simulator" in capsys.readouterr().err
    assert cli.main([*words, "--trace", write(tmp_path, bf16=True, fp8="hybrid"), "--json"]) == 0
    named = [entry["features"] for entry in json.loads(capsys.readouterr().out)["projections"]]
    assert named == ["recorded", "ciera", "dedup", "placement"]
    assert cli.main([*words, "--trace", write(tmp_path, bf16=True, fp8_param_gather=True), "--json"]) == 0
    named = [entry["features"] for entry in json.loads(capsys.readouterr().out)["projections"]]
    assert named == ["recorded", "dedup", "placement"]


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="--trace: found .*trace_rank0.json"):
        read_trace(str(tmp_path))
    (tmp_path / "trace_rank0.json").write_text('[{"ph": "M", "name": "x", "args": {"format": "other"}}]')
    with pytest.raises(ConfigurationError, match="another format"):
        read_trace(str(tmp_path))
    with pytest.raises(ConfigurationError, match="pipeline parallelism"):
        read_trace(write(tmp_path, pipeline_model_parallel_size=2))


def test_command_line_reads_a_trace(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(
        """
megatron: {num-layers: 2, hidden-size: 64, num-attention-heads: 4, vocab-size: 255, seq-length: 64,
           micro-batch-size: 1, global-batch-size: 4}
cluster: {gpu: H200, nodes: 1, gpus_per_node: 4, memory_bandwidth_gb_s: 4800,
          intra_node: {bandwidth_gb_s: 1.0e-6, latency_us: 1}, inter_node: {bandwidth_gb_s: 1.0e-6, latency_us: 1}}
"""
    )
    words = ["--config", str(config), "--trace", write(tmp_path)]
    assert cli.main([*words, "--features", "recorded"]) == 0
    assert "replayed as recorded 6000.0 ms (host times of gloo" in capsys.readouterr().out
    code = cli.main([*words, "--gpus", "4,8", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert document["recorded_seconds"] == document["replayed_as_recorded_seconds"] == 6
    assert [entry["features"] for entry in document["projections"][:4]] == [
        "recorded",
        "ciera",
        "dedup",
        "placement",
    ]


def test_shuffle_needs_the_recorded_layout_to_allow_it(tmp_path):
    trace = read_trace(write(tmp_path, tensor_model_parallel_size=1, expert_model_parallel_size=2))
    with pytest.raises(ConfigurationError, match="shuffle with TP 1 and EP 2"):
        replay(trace, target(parse_features("shuffle")))
