"""The command line that Megatron gets on CPU."""

import pytest

from megatron_ciera import cpu
from megatron_ciera.cpu import arguments
from megatron_ciera.errors import ConfigurationError

DEFAULTS = [
    "--distributed-backend gloo",
    "--transformer-impl local",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-rope-fusion",
]


def test_missing_flags_are_appended_and_noted():
    given = ["--num-layers", "2"]
    environment = {}
    completed, notes = cpu.default_arguments(given, environment)
    assert notes == [*DEFAULTS, "CUDA_DEVICE_MAX_CONNECTIONS=1"]
    assert completed == [*given, *" ".join(DEFAULTS).split()]
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert given == ["--num-layers", "2"]


def test_complete_command_line_is_left_alone():
    given = " ".join(DEFAULTS).split()
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert cpu.default_arguments(given, environment) == (given, [])
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def test_async_save_gets_the_strategy_that_the_wheel_has():
    completed, notes = cpu.default_arguments(["--async-save"], {})
    assert "--async-strategy mcore" in notes
    assert completed[-2:] == ["--async-strategy", "mcore"]
    assert "--async-strategy" not in cpu.default_arguments([], {})[0]


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--transformer-impl transformer_engine",
            "--transformer-impl: found transformer_engine, needs local",
        ),
        (
            "--transformer-impl=transformer_engine",
            "--transformer-impl: found transformer_engine, needs local",
        ),
        ("--context-parallel-size 2", "--context-parallel-size: found 2, needs 1"),
        ("--distributed-backend nccl", "--distributed-backend: found nccl, needs gloo"),
        ("--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type: found flex, needs alltoall or"),
        ("--multi-latent-attention --bf16", "--multi-latent-attention: found it set, needs a GPU"),
        ("--fp8-format hybrid", "--fp8-format: found hybrid, needs a GPU"),
        ("--use-precision-aware-optimizer", "--use-precision-aware-optimizer: found it set, needs a GPU"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp: found it set, needs a GPU: use --use-distributed"),
        ("--recompute-modules core_attn moe", "--recompute-modules: found moe, needs core_attn or"),
    ],
)
def test_what_cannot_work_is_refused(words, message):
    environment = {}
    with pytest.raises(ConfigurationError, match=message):
        cpu.default_arguments(words.split(), environment)
    assert environment == {}


def test_last_of_a_repeated_flag_counts():
    completed, _ = cpu.default_arguments(["--context-parallel-size", "2", "--context-parallel-size", "1"], {})
    assert completed[:4] == ["--context-parallel-size", "2", "--context-parallel-size", "1"]


def test_every_flag_named_is_one_of_megatrons():
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {option for action in parser._actions for option in action.option_strings}
    named = (
        {default.flag for default in arguments._DEFAULTS} | {*arguments._ACCEPTED} | {*arguments._GPU_ONLY}
    )
    assert named <= known
