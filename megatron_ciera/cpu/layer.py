"""When the CPU layer is needed, and the order in which its parts are put in place."""

import inspect
import os
import sys
import warnings

import torch

from megatron_ciera.cpu import adam, collectives, device, matmul, rng, streams
from megatron_ciera.cpu.replace import replace
from megatron_ciera.errors import ConfigurationError, refuse

DEVICE_VARIABLE = "MEGATRON_CIERA_DEVICE"

_is_installed = False


def is_needed() -> bool:
    """True if training must run on CPU: no GPU, or MEGATRON_CIERA_DEVICE=cpu (cuda: never).

    Raises ConfigurationError for another value of the variable.
    """
    if _is_installed:
        return True
    wanted = os.environ.get(DEVICE_VARIABLE)
    if wanted not in (None, "cpu", "cuda"):
        raise refuse(DEVICE_VARIABLE, wanted, "cpu or cuda", "Unset it to use a GPU where there is one.")
    return not torch.cuda.is_available() if wanted is None else wanted == "cpu"


def install() -> None:
    """Make torch answer for a CPU where Megatron asks for CUDA; idempotent, before any Megatron import.

    Raises ConfigurationError if Megatron is imported already: its modules hold functions replaced here.
    """
    global _is_installed
    if _is_installed:
        return
    # tensor_parallel/random.py takes torch.cuda._lazy_call by name; jit.py decorates at import.
    too_early = [name for name in ("megatron.core", "megatron.training") if name in sys.modules]
    if too_early:
        raise ConfigurationError(
            f"{' and '.join(too_early)}: found imported before the CPU layer, needs to come after it. "
            "Call megatron_ciera.launch.prepare() before the first import of megatron."
        )
    device.install()
    streams.install()
    rng.install()
    collectives.install()
    matmul.install()
    # 42 functions of Megatron are compiled at import (jit.py); on CPU that takes longer than it saves.
    replace(torch, "compile", _compile)
    _share_cores()
    _silence_expected_warnings()
    _is_installed = True


def install_megatron_patches() -> None:
    """Second stage, after install() and once Megatron can be imported; idempotent.

    Raises ConfigurationError if Megatron is not the version these were written for.
    """
    import megatron.training.initialize as initialize

    adam.install()
    _allow_no_cuda(initialize.initialize_megatron)


def _allow_no_cuda(initialize_megatron) -> None:
    """Turn on the default of Megatron's own switch: training.py holds the function by name."""
    parameters = inspect.signature(initialize_megatron).parameters
    with_default = [
        name for name, parameter in parameters.items() if parameter.default is not parameter.empty
    ]
    if "allow_no_cuda" not in with_default:
        raise ConfigurationError(
            "megatron.training.initialize.initialize_megatron: found no allow_no_cuda, which a run without a "
            "GPU needs. Use megatron-core >= 0.19, < 0.20."
        )
    defaults = list(initialize_megatron.__defaults__)
    defaults[with_default.index("allow_no_cuda")] = True
    initialize_megatron.__defaults__ = tuple(defaults)


def _share_cores() -> None:
    """One thread a process when several share the machine, as torchrun does, whoever launched them."""
    if "OMP_NUM_THREADS" not in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.set_num_threads(1)


def _silence_expected_warnings() -> None:
    """Ten modules of Megatron say at import, on every rank, that there is no Transformer Engine or Apex."""
    for message in (".*Apex is not installed", ".*Apex are not installed", "Only transformer-engine"):
        warnings.filterwarnings("ignore", message, UserWarning)
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true", UserWarning)


def _compile(model=None, **kwargs):
    """`torch.compile` that leaves the function as it is, as a call or as a decorator with arguments."""
    return (lambda function: function) if model is None else model
