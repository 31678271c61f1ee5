"""Whole iterations: a three-layer case by hand, variants against each other, layouts, sizes, speed."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ciera.cluster import Cluster, Link
from megatron_ciera.errors import ConfigurationError
from megatron_ciera.simulator.checks import check
from megatron_ciera.simulator.engine import simulate
from megatron_ciera.simulator.features import ChangeRates, Routing, parse_features, rates_at
from megatron_ciera.simulator.hardware import Hardware, hardware
from megatron_ciera.simulator.job import Job, job_from_config
from megatron_ciera.simulator.model import layer_parameters, stage_parameters
from megatron_ciera.simulator.project import Assumptions, default_features, default_sizes, project
from megatron_ciera.simulator.schedule import Setting, build, one_forward_one_backward
from megatron_ciera.yaml_config import load_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
THREE_LAYERS = Job(
    num_layers=3,
    hidden=8,
    heads=1,
    query_groups=1,
    head_width=8,
    ffn=8,
    gated=False,
    vocab=8,
    tied_embeddings=True,
    is_moe=(True, True, True),
    num_experts=2,
    topk=1,
    expert_ffn=8,
    shared_ffn=0,
    sequence=4,
    micro_batch=1,
    micro_batches=1,
    recompute=False,
    tensor=1,
    pipeline=1,
    expert=1,
    expert_tensor=1,
    world=2,
    gpus_per_node=1,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    grad_bytes=4,
    learning_rate=1e-4,
)
# Kernels take 1/16 s and arithmetic nothing: attention (16 kernels) 1 s, router and experts (12) 3/4 s each, output
# layer (8) 1/2 s, optimizer (50) 3.125 s. The NIC moves 256 bytes/s.
INSTANT = Hardware(1e30, 1e30, 1e30, 1 / 16, encode=512.0, decode=256.0, codec_launch=0.0)
TWO_NODES = Cluster("CPU", 2, 1, 1.0, Link(1.0, 0.0), Link(256e-9, 0.0))
RATES = ChangeRates({"dense": 8.0, "expert": 4.0}, {"dense": 1.0, "expert": 1.0})


def iteration(job, features="stock", cluster=TWO_NODES, gpu=INSTANT):
    setting = Setting(job, cluster, gpu, parse_features(features), RATES, Routing(1.0, 1.0))
    ops, ports, gathers = build(setting)
    spans = simulate(ops, ports)
    check(spans, ports)
    return {span.op.key.removeprefix("s0."): (span.start, span.end) for span in spans}, gathers


def test_sizes_by_hand():
    layer = layer_parameters(THREE_LAYERS, 0)
    # Attention 4 × 8 × 8, router 8 × 2; two experts of two 8 × 8 matrices.
    assert (layer.dense, layer.expert) == (256 + 16, 256)
    assert stage_parameters(THREE_LAYERS, 0).dense == 3 * 272 + 64


def test_three_layers_by_hand():
    at, _ = iteration(THREE_LAYERS)
    # A gather of N values moves N bytes to each of two ranks. Layer 0: 336 (embedding included) and 256 bytes share
    # the NIC until 2.0, then 80 bytes go alone.
    assert at["gather.l0.expert"] == (0, 2.0)
    assert at["gather.l0.dense"] == (0, 2.3125)
    # Layer 1 is gathered from when layer 0 starts: 272 and 256 bytes.
    assert at["gather.l1.expert"] == (2.3125, 4.3125)
    assert at["gather.l1.dense"] == (2.3125, 4.375)
    assert at["f0.l0.attention"] == (2.3125, 3.3125)
    assert at["f0.l0.router"] == (3.3125, 4.0625)
    assert at["f0.l0.experts"] == (4.0625, 4.8125)
    assert at["gather.l2.dense"] == (4.8125, 6.875)
    assert at["f0.l1.experts"] == (6.5625, 7.3125)
    assert at["f0.l2.experts"] == (9.0625, 9.8125)
    assert at["f0.output"] == (9.8125, 10.3125)
    assert at["b0.output"] == (10.3125, 11.3125)
    # Backward takes twice as long: 1.5 + 1.5 + 2 a layer. Gradients in fp32: 544 and 512 bytes.
    assert at["b0.l2.attention"] == (14.3125, 16.3125)
    assert at["reduce.l2.expert"] == (16.3125, 20.3125)
    assert at["reduce.l2.dense"] == (16.3125, 20.4375)
    assert at["reduce.l1.dense"] == (21.3125, 25.4375)
    assert at["reduce.l0.dense"] == (26.3125, 30.4375)
    assert at["reduce.embedding.dense"] == (30.4375, 30.9375)
    assert at["optimizer"] == (30.9375, 34.0625)


def test_three_layers_compressed_by_hand():
    at, gathers = iteration(THREE_LAYERS, "ciera+no-selection")
    # Half and a quarter of the bytes. Own shards of layer 0: 168 dense and 128 expert values, 512 encoded a second.
    assert at["encode.l0.dense.0"] == (0, 168 / 512)
    assert at["encode.l0.expert.0"] == (168 / 512, 296 / 512)
    # Sizes: 64 bytes of each rank.
    assert at["sizes.l0.dense.0"] == (168 / 512, 296 / 512)
    # 168 dense bytes share the NIC with 64 of sizes for 1/2 s, then with 64 expert bytes and 64 of sizes for 3/4 s,
    # the other 40 with sizes. Decoding: half the values at 256 a second.
    start = 296 / 512
    assert at["gather.l0.expert.0"] == pytest.approx((start + 0.5, start + 1.25))
    assert at["gather.l0.dense.0"] == pytest.approx((start, start + 1.25 + 0.3125))
    assert at["decode.l0.dense.0"] == pytest.approx((start + 1.5625, start + 1.5625 + 168 / 256))
    assert [gather.ratio for gather in gathers] == [0.5, 0.25] * 3


def test_selection_leaves_raw_what_does_not_pay():
    slow = replace(INSTANT, decode=1.0)
    _, gathers = iteration(THREE_LAYERS, "ciera", gpu=slow)
    assert not any(gather.coded for gather in gathers)
    raw, _ = iteration(THREE_LAYERS, "ciera", gpu=slow)
    stock, _ = iteration(THREE_LAYERS, "stock")
    assert raw == stock
    _, forced = iteration(THREE_LAYERS, "ciera+no-selection", gpu=slow)
    assert all(gather.coded for gather in forced)


def test_without_overlap_everything_is_gathered_first():
    job = replace(THREE_LAYERS, overlap_param_gather=False, overlap_grad_reduce=False)
    at, _ = iteration(job)
    assert at["f0.l0.attention"][0] == at["gather.dense"][1] == (880 + 768) / 256
    assert at["reduce.all.dense"][0] == at["b0.l0.attention"][1]


def test_pipeline_order():
    assert one_forward_one_backward(0, 2, 3) == [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]
    assert one_forward_one_backward(1, 2, 2) == [("F", 0), ("B", 0), ("F", 1), ("B", 1)]
    for stage in range(4):
        order = one_forward_one_backward(stage, 4, 2)
        assert sorted(order) == [("B", 0), ("B", 1), ("F", 0), ("F", 1)]


def test_pipeline_bubble_by_hand():
    # One layer a stage, no data parallelism: forward 2.5 s, backward 5 s; the last stage adds 0.5 and 1 s of output.
    job = replace(
        THREE_LAYERS, num_layers=2, is_moe=(True,) * 2, pipeline=2, micro_batches=2, tied_embeddings=False
    )
    links = replace(TWO_NODES, inter_node=Link(64e-9, 0.0))  # 64 bytes of activations: 1 s
    at, _ = iteration(job, cluster=links)
    assert at["f1.send"] == (5.0, 6.0)
    assert at["b0.receive"][0] == 2.5 + 1 + 3 + 6 + 1
    # The last stage runs F1, B1 right after B0: its gradient arrives at 12.5 + 9 + 1.
    assert at["b1.receive"][0] == 22.5
    assert at["optimizer"] == (27.5, 27.5 + 3.125)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_projected(path):
    config = load_config(str(path))
    job = job_from_config(config)
    gpu, assumed = hardware(config.cluster), Assumptions(rates_at(job.learning_rate))
    # Every micro-batch is alike.
    job = replace(job, micro_batches=min(job.micro_batches, 2))
    results = {
        name: project(job, config.cluster, gpu, parse_features(name), assumed, job.world)
        for name in default_features(job)
    }
    stock = results["stock"]
    assert sum(stock.split.values()) == pytest.approx(stock.seconds)
    # Selection looks at gathers alone: where compute hides them, encoding can cost a little.
    assert results["ciera"].seconds <= 1.02 * stock.seconds
    assert default_sizes(job)[-1] == 1024
    if job.expert == 1:
        return
    rows = [results[name].rows for name in ("stock", "dedup", "placement")]
    assert rows == sorted(rows, reverse=True)
    assert results["placement"].seconds < results["dedup"].seconds <= stock.seconds


def test_1024_gpus_with_64_layers_take_seconds():
    config = load_config(str(CONFIGS / "olmoe_1b_7b_a100_2n.yaml"))
    job = job_from_config(config)
    job = replace(job, num_layers=64, is_moe=(True,) * 64)
    began = time.process_time()
    for name in default_features(job):
        gpu, assumed = hardware(config.cluster), Assumptions(rates_at(1e-4))
        project(job, config.cluster, gpu, parse_features(name), assumed, 1024)
    assert time.process_time() - began < 60


def test_layout_decides_what_crosses_nodes():
    job = job_from_config(load_config(str(CONFIGS / "coupling_top6_tp16_ep16_mi300x_2n.yaml"))).on(64)
    groups = job.groups()
    assert (groups["tensor"].size, groups["tensor"].per_node, groups["tensor"].nodes) == (16, 8, 2)
    assert (groups["data"].size, groups["data"].per_node) == (4, 1)
    assert (groups["expert data"].size, groups["expert data"].nodes) == (4, 4)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("fp8-format", "hybrid", "--fp8-format: found hybrid, needs a run in bf16"),
        ("fp8-param-gather", "true", "--fp8-param-gather: found true, needs a run in bf16"),
        ("fp4-format", "e2m1", "--fp4-format: found e2m1, needs a run in bf16"),
        ("context-parallel-size", "2", "--context-parallel-size: found 2"),
        ("expert-tensor-parallel-size", "2", "--expert-tensor-parallel-size: found 2, needs 1"),
        ("moe-token-dispatcher-type", "flex", "--moe-token-dispatcher-type: found flex"),
        ("moe-layer-freq", "([0]*1+[1]*3)", r"--moe-layer-freq: .* needs 2 entries"),
        ("global-batch-size", "1", "--global-batch-size: found 1, needs a multiple of"),
    ],
)
def test_what_is_not_modelled_is_refused(flag, value, message):
    config = load_config(str(CONFIGS / "tiny_cpu.yaml"))
    config.flags[f"--{flag}"] = [value]
    with pytest.raises(ConfigurationError, match=message):
        job_from_config(config)


@pytest.mark.parametrize(
    ("instead", "found"), [("--fp16", "found --fp16"), (None, r"found neither .* \(fp32\)")]
)
def test_other_precisions_than_bf16_are_refused(instead, found):
    config = load_config(str(CONFIGS / "tiny_cpu.yaml"))
    del config.flags["--bf16"]
    config.flags.update({instead: None} if instead else {})
    with pytest.raises(ConfigurationError, match=f"--bf16: {found}, needs it in the simulator"):
        job_from_config(config)
    job_from_config(config, from_trace=True)


def test_sizes_that_do_not_fit_are_refused():
    job = job_from_config(load_config(str(CONFIGS / "coupling_top6_tp1_ep32_mi300x_4n.yaml")))
    with pytest.raises(ConfigurationError, match="--gpus: found 48, needs a multiple of 32"):
        job.on(48)
