"""When the CPU layer is needed, and the order in which its parts are put in place."""

import os
import sys

import torch

from megatron_ciera.compat.patching import check_signature, is_replaced, replace
from megatron_ciera.cpu import adam, collectives, device, matmul, rng, streams

DEVICE_VARIABLE = "MEGATRON_CIERA_DEVICE"


def is_needed() -> bool:
    """True if training must run on CPU: no GPU, or MEGATRON_CIERA_DEVICE=cpu (cuda: never).

    Raises ValueError for another value of the variable.
    """
    wanted = os.environ.get(DEVICE_VARIABLE)
    if wanted is None:
        return not torch.cuda.is_available()
    if wanted not in ("cpu", "cuda"):
        raise ValueError(f"{DEVICE_VARIABLE}={wanted}: cpu or cuda is needed; unset it to choose by itself")
    return wanted == "cpu"


def install() -> None:
    """Make torch answer for a CPU where Megatron asks for CUDA; idempotent, before any Megatron import.

    Raises RuntimeError if Megatron is imported already: its modules hold the functions replaced here.
    """
    if is_replaced(torch, "compile"):
        return
    # tensor_parallel/random.py takes torch.cuda._lazy_call by name; jit.py decorates at import.
    too_early = [name for name in ("megatron.core", "megatron.training") if name in sys.modules]
    if too_early:
        raise RuntimeError(
            f"{', '.join(too_early)} was imported before the CPU layer, which has to come first; "
            "call megatron_ciera.cpu.install() before the first import of megatron"
        )
    device.install()
    streams.install()
    rng.install()
    collectives.install()
    matmul.install()
    # 42 functions of Megatron are compiled at import (jit.py); on CPU that takes longer than it saves.
    replace(torch, "compile", _compile)


def install_megatron_patches() -> None:
    """Second stage, once Megatron can be imported; idempotent. Raises RuntimeError if Megatron differs."""
    import megatron.training.initialize as initialize

    adam.install()
    _allow_no_cuda(initialize.initialize_megatron)


def _allow_no_cuda(initialize_megatron) -> None:
    """Turn on the default of Megatron's own switch: training.py imports the function by name."""
    import inspect

    parameters = inspect.signature(initialize_megatron).parameters
    if "allow_no_cuda" not in parameters:
        raise RuntimeError(
            "megatron.training.initialize.initialize_megatron has no allow_no_cuda; "
            "use megatron-core >= 0.19, < 0.20"
        )
    with_default = [name for name, p in parameters.items() if p.default is not p.empty]
    defaults = list(initialize_megatron.__defaults__)
    defaults[with_default.index("allow_no_cuda")] = True
    initialize_megatron.__defaults__ = tuple(defaults)


def _compile(model=None, **kwargs):
    """`torch.compile` that leaves the function as it is, as a call or as a decorator with arguments."""
    return (lambda function: function) if model is None else model
