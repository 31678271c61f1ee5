"""Flags that placement and deduplicating dispatch cannot work with end the run by name."""

import json

import numpy as np
import pytest

from megatron_ciera import transformer_engine, validation
from megatron_ciera.errors import ConfigurationError
from megatron_ciera.moe import rules
from placement.file import DECODER, MTP, LayerId, LayerPlacement, Placement

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
)


def write(folder, num_experts=8, topk=2, ranks=2, layers=(0, 1, 2, 3), mtp=(), **changes):
    ids = [LayerId(DECODER, layer) for layer in layers] + [LayerId(MTP, depth) for depth in mtp]
    placement = Placement(
        num_experts,
        topk,
        ranks,
        ranks,
        tuple(LayerPlacement(layer_id, np.arange(num_experts)[::-1].copy()) for layer_id in ids),
        {"tokens": 64, "source": "test", "iteration": 1},
    )
    path = folder / "placement.json"
    path.write_text(json.dumps({**placement.to_document(), **changes}))
    return path


def check(parse_flags, words):
    validation.before_megatron(parse_flags(BASE + words))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            "--correlated-placement --bf16 --fp8-format hybrid",
            "found --fp8-format hybrid with --fp8-recipe delayed .* Set --fp8-recipe tensorwise",
        ),
        (
            "--correlated-placement --bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
            "--correlated-placement: found --fp8-param-gather, needs bf16 parameters",
        ),
        ("--correlated-placement --moe-single-grouped-weight", "found --moe-single-grouped-weight"),
        ("--correlated-placement --optimizer-cpu-offload", "found --optimizer-cpu-offload"),
        ("--correlated-placement --optimizer muon", "found --optimizer muon, needs adam or sgd"),
        (
            "--correlated-placement --use-precision-aware-optimizer --exp-avg-dtype fp8",
            "--exp-avg-dtype: found fp8, needs fp32 or bf16",
        ),
        ("--dedup-dispatch --transformer-impl inference_optimized", "--transformer-impl inference_optimized"),
        ("--dedup-dispatch --moe-router-padding-for-quantization", "--moe-router-padding-for-quantization"),
    ],
)
def test_refused(parse_flags, words, reason):
    with pytest.raises(ConfigurationError, match=reason):
        check(parse_flags, words)


def test_fp8_products_over_bf16_parameters_are_fine(parse_flags):
    check(parse_flags, "--correlated-placement --bf16 --fp8-format hybrid --fp8-recipe tensorwise")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", "--transformer-impl transformer_engine .* or set --transformer-impl local"),
        (
            "--transformer-impl local --moe-permute-fusion",
            "--moe-permute-fusion: found no Transformer Engine",
        ),
        (
            "--transformer-impl local --use-precision-aware-optimizer",
            "--use-precision-aware-optimizer: found no",
        ),
    ],
)
def test_transformer_engine_is_missed_by_name(parse_flags, words, reason):
    args = parse_flags(BASE + "--dedup-dispatch " + words)
    with pytest.raises(ConfigurationError, match=reason):
        transformer_engine.check(args, is_there=False)
    transformer_engine.check(args, is_there=True)


def test_sharded_expert_weights_are_refused(parse_flags):
    args = parse_flags(BASE + "--correlated-placement")
    args.expert_gtp_weight_remat_size, args.expert_tensor_parallel_num_weight_shards = 2, 2
    with pytest.raises(ConfigurationError, match="--expert-tensor-parallel-num-weight-shards: found 2"):
        rules.check_derived(args)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ("moe", "found --cuda-graph-impl transformer_engine over moe"),
        ("attn moe_router moe_preprocess", "over moe_preprocess"),
        ("", "over whole layers"),
    ],
)
def test_graphs_over_the_dispatcher_are_refused(parse_flags, modules, reason):
    words = "--dedup-dispatch --cuda-graph-impl transformer_engine"
    args = parse_flags(BASE + words + (f" --cuda-graph-modules {modules}" if modules else ""))
    with pytest.raises(ConfigurationError, match=reason):
        rules.check_graphs(args, "--dedup-dispatch")


@pytest.mark.parametrize("modules", ["attn", "attn moe_router"])
def test_graphs_beside_the_dispatcher_are_fine(parse_flags, modules):
    words = f"--dedup-dispatch --cuda-graph-impl transformer_engine --cuda-graph-modules {modules}"
    rules.check_graphs(parse_flags(BASE + words), "--dedup-dispatch")


def test_a_fitting_file_is_accepted(parse_flags, tmp_path):
    check(parse_flags, f"--correlated-placement --placement-file {write(tmp_path)}")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"num_experts": 16}, "num_experts is 16, the model has 8"),
        ({"topk": 6}, "topk is 6, the model has 2"),
        ({"ranks": 4}, "expert_parallel_size is 4, the model has 2"),
        ({"layers": (0, 1, 2)}, "layer 3 is missing"),
        ({"layers": (0, 1, 2, 3, 4)}, "layer 4 is not an MoE layer"),
        ({"mtp": (0,)}, "MTP layer 0 is not an MoE layer"),
        ({"format": "other"}, "format is 'other'"),
        ({"version": 2}, "version is 2"),
    ],
)
def test_a_file_of_another_model_is_refused(parse_flags, tmp_path, made, reason):
    path = write(tmp_path, **made)
    with pytest.raises(ConfigurationError, match=f"--placement-file: .*{reason}"):
        check(parse_flags, f"--correlated-placement --placement-file {path}")


def test_a_file_that_is_no_permutation_is_refused(parse_flags, tmp_path):
    path = write(tmp_path)
    document = json.loads(path.read_text())
    document["layers"][2]["physical_to_logical_map"] = [0, 1, 2, 3, 4, 5, 6, 6]
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match="layer 2: expert 6 is in several slots"):
        check(parse_flags, f"--correlated-placement --placement-file {path}")


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("", [0, 1, 2, 3]),
        ("--moe-layer-freq 2", [0, 2]),
        ("--moe-layer-freq [0,1,1,0]", [1, 2]),
        ("--moe-layer-freq ([0]*1+[1]*3)", [1, 2, 3]),
    ],
)
def test_moe_layers_of_the_model(parse_flags, words, layers):
    assert rules.decoder_moe_layers(parse_flags((BASE + words).split())) == layers
