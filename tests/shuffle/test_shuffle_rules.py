"""Flags that token shuffling cannot work with end the run by name, before any process group is made."""

import pytest
from shuffle_files import write_placement

from megatron_ciera import flags, validation
from megatron_ciera.errors import ConfigurationError
from megatron_ciera.shuffle import rules

BASE = (
    "--num-layers 5 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 --hidden-dropout 0 "
    "--transformer-impl local "
)

REFUSED = [
    (
        "--expert-model-parallel-size 4",
        "found --tensor-model-parallel-size 2 and --expert-model-parallel-size 4, needs the two to be equal",
    ),
    ("--expert-tensor-parallel-size 2", "found --expert-tensor-parallel-size 2, needs 1"),
    ("--context-parallel-size 2", "found --context-parallel-size 2, needs a run without it"),
    ("--multi-latent-attention", "found --multi-latent-attention"),
    ("--sft", "found --sft, needs a run without it: packed sequences"),
    ("--dataloader-inter-document-masking", "found --dataloader-inter-document-masking"),
    ("--rl-use-sequence-packing", "found --rl-use-sequence-packing"),
    ("--hybrid-layer-pattern M*-", "found --hybrid-layer-pattern M\\*-, needs a run without it: Mamba"),
    ("--overlap-moe-expert-parallel-comm", "found --overlap-moe-expert-parallel-comm"),
    ("--moe-expert-capacity-factor 1.5", "found --moe-expert-capacity-factor 1.5"),
    ("--moe-router-padding-for-quantization", "found --moe-router-padding-for-quantization"),
    ("--moe-router-force-load-balancing", "found --moe-router-force-load-balancing"),
    ("--moe-enable-routing-replay", "found --moe-enable-routing-replay"),
    ("--fused-residual-rmsnorm", "found --fused-residual-rmsnorm"),
    ("--fine-grained-activation-offloading", "found --fine-grained-activation-offloading"),
    ("--mlp-chunks-for-training 2", "found --mlp-chunks-for-training 2"),
    ("--fp8-format hybrid --bf16", "found --fp8-format hybrid"),
    ("--transformer-impl inference_optimized", "found --transformer-impl inference_optimized"),
    ("--moe-token-dispatcher-type allgather", "needs alltoall or flex"),
    ("--moe-router-load-balancing-type sinkhorn", "found --moe-router-load-balancing-type sinkhorn"),
    ("--moe-routing-trace-path traces", "needs --moe-routing-trace-max-training-iters"),
    ("--num-layers 3", "found --num-layers 3 with 3 MoE layers, needs four layers or more"),
    ("--moe-layer-freq [1,0,0,0,1]", "with 2 MoE layers"),
    (
        "--token-shuffle-residual partial-sums --hidden-dropout 0.1",
        "partial-sums: found --hidden-dropout 0.1",
    ),
    (
        "--token-shuffle-residual partial-sums --transformer-impl transformer_engine",
        "partial-sums: found --transformer-impl transformer_engine, needs local",
    ),
    (
        "--correlated-placement --placement-refit-interval 10",
        "--placement-refit-interval: found 10, needs 0 or",
    ),
]


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_refused(parse_flags, words, message):
    with pytest.raises(ConfigurationError, match=message):
        validation.before_megatron(parse_flags(BASE + "--token-shuffle " + words, world_size=8))


def test_without_sequence_parallel(parse_flags):
    words = BASE.replace("--sequence-parallel", "") + "--token-shuffle"
    with pytest.raises(ConfigurationError, match="needs --sequence-parallel"):
        validation.before_megatron(parse_flags(words))


def test_graphs_are_refused(parse_flags):
    args = parse_flags(
        BASE + "--token-shuffle --cuda-graph-impl transformer_engine --cuda-graph-modules attn"
    )
    with pytest.raises(ConfigurationError, match="found --cuda-graph-impl transformer_engine, needs none"):
        rules.check_derived(args)


def test_a_residual_without_shuffling(parse_flags):
    with pytest.raises(ConfigurationError, match="--token-shuffle-residual: found no --token-shuffle"):
        validation.before_megatron(parse_flags(BASE + "--token-shuffle-residual exchange"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": False}, "without .*placement.npz, needs the prediction tables"),
        ({"beats_chance": False}, "that predict no layer better than its tokens' position"),
    ],
)
def test_placement_files_without_useful_tables(parse_flags, tmp_path, options, message):
    path = write_placement(tmp_path / "placement.json", 5, 2, **options)
    words = f"--token-shuffle --correlated-placement --placement-file {path}"
    with pytest.raises(ConfigurationError, match=message):
        validation.before_megatron(parse_flags(BASE + words))


def test_accepted_with_its_defaults(parse_flags, tmp_path):
    path = write_placement(tmp_path / "placement.json", 5, 2)
    args = parse_flags(BASE + f"--token-shuffle --correlated-placement --placement-file {path}")
    validation.before_megatron(args)
    assert flags.config_from_args(args).token_shuffle_residual == "exchange"
    validation.before_megatron(parse_flags(BASE + "--token-shuffle --placement-fit-iteration 7"))
