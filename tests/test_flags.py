import pytest

from megatron_ciera import flags, install, validation
from megatron_ciera.errors import ConfigurationError

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 8 --num-experts 8 --expert-model-parallel-size 2 "
    "--use-distributed-optimizer --moe-token-dispatcher-type alltoall "
)


def test_nothing_given_is_nothing_attached(parse_flags):
    args = parse_flags(BASE)
    assert flags.given_flags(args) == []
    validation.before_megatron(args)
    assert flags.config_from_args(args) == flags.CieraConfig()


def test_given_flags_as_spelled(parse_flags):
    args = parse_flags(BASE + "--ciera --ciera-block-size 256 --no-dedup-dispatch --placement-fit-tokens 64")
    assert flags.given_flags(args) == [
        "--ciera",
        "--ciera-block-size",
        "--placement-fit-tokens",
        "--no-dedup-dispatch",
    ]


@pytest.mark.parametrize(
    ("extra", "dedup"),
    [
        ("--correlated-placement", True),
        ("--correlated-placement --no-dedup-dispatch", False),
        ("--correlated-placement --moe-token-dispatcher-type allgather", False),
        ("--dedup-dispatch", True),
        ("--ciera", False),
    ],
)
def test_deduplicating_dispatcher_default(parse_flags, extra, dedup):
    args = parse_flags(BASE + extra)
    validation.before_megatron(args)
    assert flags.config_from_args(args).dedup_dispatch is dedup


def test_defaults_and_values(parse_flags):
    args = parse_flags(
        BASE + "--ciera --correlated-placement --ciera-warmup-iters 2 --placement-load-tolerance 0"
    )
    config = flags.config_from_args(args)
    assert (config.ciera_codec, config.ciera_coder, config.ciera_block_size) == ("auto", "auto", 512)
    assert (config.ciera_warmup_iters, config.ciera_cache_budget_mb) == (2, None)
    assert (config.placement_fit_iteration, config.placement_refit_interval) == (1000, 1000)
    assert (config.placement_fit_tokens, config.placement_load_tolerance) == (4096, 0.0)


REFUSED = [
    ("--ciera --ciera-block-size 0", "--ciera-block-size: found 0"),
    ("--ciera --ciera-block-size 100", "--ciera-block-size: found 100, needs a multiple of 8"),
    ("--ciera --ciera-warmup-iters -1", "--ciera-warmup-iters: found -1"),
    ("--ciera --ciera-cache-budget-mb nan", "--ciera-cache-budget-mb: found nan"),
    ("--ciera-codec delta", "--ciera-codec: found no --ciera"),
    ("--ciera-no-overlap", "--ciera-no-overlap: found no --ciera"),
    ("--placement-file p.json", "--placement-file: found no --correlated-placement"),
    ("--correlated-placement --placement-file no/such.json", "--placement-file: found no/such.json"),
    (
        "--correlated-placement --placement-file setup.py --placement-fit-iteration 5",
        "--placement-fit-iteration",
    ),
    ("--correlated-placement --placement-fit-tokens 1", "--placement-fit-tokens: found 1"),
    ("--correlated-placement --save x --ckpt-format torch", "--ckpt-format: found torch"),
    ("--correlated-placement --moe-router-force-load-balancing", "--moe-router-force-load-balancing"),
    ("--correlated-placement --expert-model-parallel-size 1", "--expert-model-parallel-size 1"),
    ("--dedup-dispatch --num-experts 7", "--num-experts: found 7"),
    ("--dedup-dispatch --moe-token-dispatcher-type allgather", "--moe-token-dispatcher-type alltoall"),
    ("--token-shuffle", "--token-shuffle: found --tensor-model-parallel-size 1"),
    ("--ciera --tensor-model-parallel-size 2", "needs --sequence-parallel"),
    ("--ciera --tensor-model-parallel-size 3", "found 4 processes, needs a multiple of 3"),
    ("--ciera --expert-model-parallel-size 8", "found 4 processes, needs a multiple of 8"),
    ("--ciera --global-batch-size 6", "--global-batch-size: found 6, needs a multiple of 4"),
    ("--ciera --use-megatron-fsdp", "--ciera: found --use-megatron-fsdp"),
    ("--ciera --use-torch-fsdp2", "--ciera: found --use-torch-fsdp2"),
]


@pytest.mark.parametrize(("extra", "message"), REFUSED, ids=[extra for extra, _ in REFUSED])
def test_refusals_name_flag_value_and_way_out(parse_flags, extra, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        validation.before_megatron(parse_flags(BASE + extra))
    assert ", needs " in str(caught.value)


def test_ciera_without_distributed_optimizer(parse_flags):
    words = BASE.replace("--use-distributed-optimizer ", "") + "--ciera"
    with pytest.raises(ConfigurationError, match="--ciera: found no --use-distributed-optimizer"):
        validation.before_megatron(parse_flags(words))


def test_placement_without_experts(parse_flags):
    words = BASE.replace("--num-experts 8 --expert-model-parallel-size 2 ", "") + "--correlated-placement"
    with pytest.raises(ConfigurationError, match="--correlated-placement: found a model without experts"):
        validation.before_megatron(parse_flags(words))


def test_expert_tensor_parallelism_is_refused_for_dedup(parse_flags):
    args = parse_flags(BASE + "--dedup-dispatch --tensor-model-parallel-size 2 --sequence-parallel")
    validation.before_megatron(args)
    with pytest.raises(ConfigurationError, match="--expert-tensor-parallel-size: found 2"):
        validation.after_megatron(args)


@pytest.mark.parametrize(("value", "disabled"), [("1", True), ("0", False), ("", False)])
def test_switching_everything_off(monkeypatch, value, disabled):
    monkeypatch.setenv(install.DISABLE, value)
    assert install._disabled() is disabled


def test_a_switch_that_could_mean_either_ends_the_run(monkeypatch):
    ended = []
    monkeypatch.setattr(install, "exit_with", ended.append)
    monkeypatch.setenv(install.DISABLE, "true")
    install._disabled()
    assert "MEGATRON_CIERA_DISABLE: found true, needs 1" in str(*ended)
