"""Sequence parallelism with torch's own norms, for machines without Transformer Engine and Apex.

Megatron's local layer spec falls back to `WrappedTorchNorm`, which refuses `--sequence-parallel`. The norm
itself works on any slice of the sequence; what sequence parallelism adds is that the gradients of its
weights are partial sums, to be all-reduced over the tensor-parallel group. Megatron does that
(`finalize_model_grads`) for every parameter that carries `sequence_parallel = True`.
"""

import copy

from megatron_ciera.seam import wrap


def install() -> None:
    """Let `megatron.core.transformer.torch_norm.WrappedTorchNorm` build norms for sequence parallelism.

    Idempotent. Raises ConfigurationError if the class is not the one of Megatron-Core 0.19.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    wrap(WrappedTorchNorm, "__new__", ("cls", "config", "hidden_size", "eps"), _with_sequence_parallel)


def _with_sequence_parallel(build):
    def new_norm(cls, config, *args, **kwargs):
        if not config.sequence_parallel:
            return build(cls, config, *args, **kwargs)
        whole_sequence = copy.copy(config)
        whole_sequence.sequence_parallel = False
        norm = build(cls, whole_sequence, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new_norm
