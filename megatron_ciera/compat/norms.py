"""Sequence parallelism with torch's own norms, for machines without Transformer Engine and Apex.

Megatron's local layer spec falls back to `WrappedTorchNorm`, which refuses `--sequence-parallel`. The norm
itself works on any slice of the sequence; what sequence parallelism adds is that the gradients of its
weights are partial sums, to be all-reduced over the tensor-parallel group. Megatron does that
(`finalize_model_grads`) for every parameter that carries `sequence_parallel = True`.
"""

import copy

from megatron_ciera.compat.patching import check_signature, is_replaced, original, replace

_PARAMETERS = (
    "cls",
    "config",
    "hidden_size",
    "eps",
    "persist_layer_norm",
    "zero_centered_gamma",
    "normalization",
)


def install() -> None:
    """Let `megatron.core.transformer.torch_norm.WrappedTorchNorm` build norms for sequence parallelism."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if is_replaced(WrappedTorchNorm, "__new__"):
        return
    check_signature(WrappedTorchNorm, "__new__", _PARAMETERS)
    replace(WrappedTorchNorm, "__new__", staticmethod(_new_norm))


def _new_norm(cls, config, *args, **kwargs):
    build = original(cls, "__new__").__func__
    if not config.sequence_parallel:
        return build(cls, config, *args, **kwargs)
    whole_sequence = copy.copy(config)
    whole_sequence.sequence_parallel = False
    norm = build(cls, whole_sequence, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm
