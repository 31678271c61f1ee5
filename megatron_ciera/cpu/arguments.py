"""Megatron's command line on CPU: what it needs to say, and what it cannot ask for."""

import os
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class _Default:
    """`flag value` (no value: a switch) is added unless `flag` is given."""

    flag: str
    value: str | None = None


_DEFAULTS = (
    # NCCL has no CPU tensors.
    _Default("--distributed-backend", "gloo"),
    # Without Transformer Engine: the local layer spec, and none of the CUDA extensions.
    _Default("--transformer-impl", "local"),
    _Default("--no-gradient-accumulation-fusion"),
    _Default("--no-persist-layer-norm"),
    _Default("--no-masked-softmax-fusion"),
    _Default("--no-rope-fusion"),
    # The default strategy needs nvidia-resiliency-ext.
    _Default("--async-strategy", "mcore"),
)

# CUDA_DEVICE_MAX_CONNECTIONS: validate_args wants 1 with tensor parallelism.
# OMP_NUM_THREADS: several processes share the cores; torchrun sets the same.
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class _Refusal:
    """`flag` stops the run if `is_bad(value)`; `value` is None for a switch. `wanted` names the way out."""

    flag: str
    is_bad: Callable[[str | None], bool]
    wanted: str


def _always(value: str | None) -> bool:
    return True


def _other_than(*accepted: str) -> Callable[[str | None], bool]:
    return lambda value: value not in accepted


_NEEDS_TE = "it needs Transformer Engine, leave it out on CPU"

_REFUSALS = (
    _Refusal("--distributed-backend", _other_than("gloo"), "gloo is needed"),
    _Refusal("--transformer-impl", _other_than("local"), "local is needed"),
    _Refusal(
        "--context-parallel-size",
        _other_than("1"),
        "1 is needed, the local attention has no context parallelism",
    ),
    _Refusal(
        "--hierarchical-context-parallel-sizes",
        _always,
        "leave it out on CPU, the local attention has no context parallelism",
    ),
    _Refusal("--multi-latent-attention", _always, _NEEDS_TE),
    _Refusal("--experimental-attention-variant", _always, "leave it out on CPU, it has GPU kernels only"),
    _Refusal("--attention-backend", _other_than("auto", "local", "unfused"), "auto or local is needed"),
    _Refusal("--use-flash-attn", _always, "leave it out on CPU, FlashAttention has GPU kernels only"),
    _Refusal(
        "--moe-token-dispatcher-type", _other_than("alltoall", "allgather"), "alltoall or allgather is needed"
    ),
    _Refusal("--moe-enable-deepep", _always, "leave it out on CPU, DeepEP has GPU kernels only"),
    _Refusal("--moe-permute-fusion", _always, _NEEDS_TE),
    _Refusal("--moe-router-fusion", _always, _NEEDS_TE),
    _Refusal("--fp8-format", _always, _NEEDS_TE),
    _Refusal("--fp8-param-gather", _always, _NEEDS_TE),
    _Refusal("--fp4-format", _always, _NEEDS_TE),
    _Refusal("--fp4-param-gather", _always, _NEEDS_TE),
    _Refusal("--te-rng-tracker", _always, _NEEDS_TE),
    _Refusal("--tp-comm-overlap", _always, _NEEDS_TE),
    _Refusal("--cross-entropy-fusion-impl", _other_than("native"), "native is needed"),
    _Refusal("--use-precision-aware-optimizer", _always, _NEEDS_TE),
    _Refusal("--optimizer-cpu-offload", _always, "leave it out, the optimizer is on CPU already"),
    _Refusal("--optimizer-cuda-graph", _always, "leave it out on CPU"),
    _Refusal("--cuda-graph-impl", _other_than("none"), "none is needed"),
    _Refusal("--enable-cuda-graph", _always, "leave it out on CPU"),
    _Refusal("--external-cuda-graph", _always, "leave it out on CPU"),
    _Refusal("--use-megatron-fsdp", _always, "use --use-distributed-optimizer on CPU"),
    _Refusal("--use-torch-fsdp2", _always, "use --use-distributed-optimizer on CPU"),
    _Refusal("--use-nccl-ub", _always, "leave it out on CPU, NCCL is not used"),
    _Refusal("--async-strategy", _other_than("mcore"), "mcore is needed"),
)


def default_arguments(
    argv: Sequence[str], environment: MutableMapping[str, str] | None = None
) -> tuple[list[str], list[str]]:
    """Complete a Megatron command line for CPU.

    Args:
        argv: Megatron's arguments, without the script; not changed.
        environment: variables to complete; os.environ if None. Must be done before torch starts threads.
    Returns:
        The arguments with the missing flags appended, and one note for each addition, e.g.
        "--distributed-backend gloo". What the user gave is never changed.
    Raises:
        ValueError: a given flag cannot work on CPU; names flag, value found, value needed. All ranks get
            the same command line and so the same error, before any process group is made.
    """
    environment = os.environ if environment is None else environment
    completed = list(argv)
    _refuse_impossible(completed)
    notes = []
    for default in _DEFAULTS:
        if not _is_given(completed, default.flag):
            added = [default.flag] if default.value is None else [default.flag, default.value]
            completed += added
            notes.append(" ".join(added))
    for name, value in _ENVIRONMENT.items():
        if name not in environment:
            environment[name] = value
            notes.append(f"{name}={value}")
    return completed, notes


def _refuse_impossible(argv: Sequence[str]) -> None:
    for refusal in _REFUSALS:
        for value in _values(argv, refusal.flag):
            if refusal.is_bad(value):
                found = refusal.flag if value is None else f"{refusal.flag} {value}"
                raise ValueError(f"{found} cannot work without a GPU: {refusal.wanted}")


def _is_given(argv: Sequence[str], flag: str) -> bool:
    return bool(_values(argv, flag))


def _values(argv: Sequence[str], flag: str) -> list[str | None]:
    """The last value given for `flag`, as a list of one; [None] for a switch, [] if it is not given.

    Megatron's parser takes no abbreviations, and of several values the last one counts.
    """
    values: list[str | None] = []
    for position, word in enumerate(argv):
        if word == flag:
            following = argv[position + 1] if position + 1 < len(argv) else "--"
            values.append(None if following.startswith("--") else following)
        elif word.startswith(flag + "="):
            values.append(word[len(flag) + 1 :])
    return values[-1:]
