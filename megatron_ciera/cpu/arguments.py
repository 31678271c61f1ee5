"""Megatron's command line on CPU: what it needs to say, and what it cannot ask for."""

import os
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from megatron_ciera.errors import refuse
from megatron_ciera.transformer_engine import LOCAL_LAYERS


@dataclass(frozen=True)
class _Default:
    """`flag value` (no value: a switch), added where `flag` is not given and `only_with` is."""

    flag: str
    value: str | None = None
    only_with: str | None = None


_DEFAULTS = (
    # NCCL has no CPU tensors.
    _Default("--distributed-backend", "gloo"),
    _Default(*LOCAL_LAYERS[:2]),
    *(_Default(switch) for switch in LOCAL_LAYERS[2:]),
    # Megatron's default strategy needs nvidia-resiliency-ext.
    _Default("--async-strategy", "mcore", only_with="--async-save"),
)

# validate_args wants it with tensor parallelism; on CPU there are no hardware queues to order.
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}

# Flags that work on CPU with some values only.
_ACCEPTED = {
    "--distributed-backend": ("gloo",),
    "--transformer-impl": ("local",),
    "--context-parallel-size": ("1",),
    "--attention-backend": ("auto", "local", "unfused"),
    "--moe-token-dispatcher-type": ("alltoall", "allgather"),
    "--cross-entropy-fusion-impl": ("native",),
    "--cuda-graph-impl": ("none",),
    "--recompute-modules": ("core_attn", "mlp", "shared_experts"),
}

_TRANSFORMER_ENGINE = "it is part of Transformer Engine"
_GPU_KERNELS = "its kernels are for GPUs only"
_CUDA_GRAPHS = "there is no CUDA to record graphs of"
_FULLY_SHARDED = "use --use-distributed-optimizer"

# Flags that must be absent on CPU, and why or what instead.
_GPU_ONLY = {
    "--hierarchical-context-parallel-sizes": "the local attention has no context parallelism",
    "--multi-latent-attention": _TRANSFORMER_ENGINE,
    "--experimental-attention-variant": _GPU_KERNELS,
    "--use-flash-attn": _GPU_KERNELS,
    "--moe-enable-deepep": _GPU_KERNELS,
    "--moe-permute-fusion": _TRANSFORMER_ENGINE,
    "--moe-router-fusion": _TRANSFORMER_ENGINE,
    "--fp8-format": _TRANSFORMER_ENGINE,
    "--fp8-param-gather": _TRANSFORMER_ENGINE,
    "--fp4-format": _TRANSFORMER_ENGINE,
    "--fp4-param-gather": _TRANSFORMER_ENGINE,
    "--te-rng-tracker": _TRANSFORMER_ENGINE,
    "--tp-comm-overlap": _TRANSFORMER_ENGINE,
    "--use-precision-aware-optimizer": _TRANSFORMER_ENGINE,
    "--optimizer-cpu-offload": "the optimizer is on CPU already",
    "--optimizer-cuda-graph": _CUDA_GRAPHS,
    "--enable-cuda-graph": _CUDA_GRAPHS,
    "--external-cuda-graph": _CUDA_GRAPHS,
    "--use-megatron-fsdp": _FULLY_SHARDED,
    "--use-torch-fsdp2": _FULLY_SHARDED,
    "--use-nccl-ub": "NCCL is not used",
    "--record-memory-history": "there is no CUDA memory",
}

_WAY_OUT = "Change or leave out the flag, or run where there is a GPU (megatron-ciera found none)."


def default_arguments(
    argv: Sequence[str], environment: MutableMapping[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """Complete a Megatron command line for CPU.

    Args:
        argv: Megatron's arguments, without the script; not changed.
        environment: variables to complete; os.environ if None.

    Returns:
        The arguments with the missing flags appended, and one note for each addition, as it would be typed.
        What the user gave is never changed.

    Raises:
        ConfigurationError: a given flag cannot work on CPU. All ranks get the same command line and so the
            same error, before any process group is made.
    """
    environment = os.environ if environment is None else environment
    given = _words_after_flags(argv)
    _refuse_impossible(given)
    completed, notes = list(argv), []
    for default in _DEFAULTS:
        is_wanted = default.only_with is None or default.only_with in given
        if is_wanted and default.flag not in given:
            added = [default.flag] if default.value is None else [default.flag, default.value]
            completed += added
            notes.append(" ".join(added))
    for name, value in _ENVIRONMENT.items():
        if name not in environment:
            environment[name] = value
            notes.append(f"{name}={value}")
    return completed, notes


def _refuse_impossible(given: dict[str, list[str]]) -> None:
    for flag, accepted in _ACCEPTED.items():
        for value in given.get(flag, []):
            if value not in accepted:
                raise refuse(flag, value, f"{' or '.join(accepted)} without a GPU", _WAY_OUT)
    for flag, reason in _GPU_ONLY.items():
        if flag in given:
            found = " ".join(given[flag]) or "it set"
            raise refuse(flag, found, f"a GPU: {reason}", _WAY_OUT)
    if "--profile" in given and "--use-pytorch-profiler" not in given:
        raise refuse("--profile", "no --use-pytorch-profiler", "it, as nsys needs a GPU", "Add it.")


def _words_after_flags(argv: Sequence[str]) -> dict[str, list[str]]:
    """Each flag given and the words after it. Of a repeated flag the last counts, as for argparse.

    Megatron's parser takes no abbreviations. A word that starts with two dashes is a flag.
    """
    given: dict[str, list[str]] = {}
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            words = given[flag] = [value] if equals else []
        else:
            words.append(word)
    return given
