"""The one device of a run without a GPU: every "cuda" becomes the CPU.

Megatron names the device in about fifty places as the string "cuda", as an index, or through
`torch.cuda.current_device()`. A torch function mode rewrites it where a tensor is made or moved; the
queries of `torch.cuda` answer for one device per process.
"""

import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_ciera.cpu.replace import replace

CPU = torch.device("cpu")

# Names that Megatron compares with `Tensor.type()` (optimizer.py, distrib_optimizer.py, clip_grads.py).
_CUDA_TYPE_NAMES = {
    torch.float64: "torch.cuda.DoubleTensor",
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.int64: "torch.cuda.LongTensor",
    torch.int32: "torch.cuda.IntTensor",
    torch.int16: "torch.cuda.ShortTensor",
    torch.int8: "torch.cuda.CharTensor",
    torch.uint8: "torch.cuda.ByteTensor",
    torch.bool: "torch.cuda.BoolTensor",
}


def on_cpu(device: Any) -> Any:
    """`device` with every spelling of a CUDA device replaced by the CPU; anything else is returned as is."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device == "cuda" or device.startswith("cuda:") else device
    return device


class CudaToCpu(TorchFunctionMode):
    """Rewrites the device of every torch call of this thread. Costs about 1 us a call."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs) if kwargs else {}
        if func is torch.device:
            return on_cpu(func(*args, **kwargs))
        if kwargs.get("device") is not None:
            device = kwargs["device"]
            # A bare index is only ever a CUDA device.
            kwargs["device"] = CPU if isinstance(device, int) else on_cpu(device)
        return func(*(on_cpu(argument) for argument in args), **kwargs)


_mode: CudaToCpu | None = None


def install() -> None:
    """Enter the function mode in this thread and answer torch.cuda's device queries for one CPU device.

    `torch.cuda.is_available()` stays False: it tells Megatron's optional GPU parts to stay away.
    """
    global _mode
    if _mode is not None:
        return
    _replace_queries()
    _replace_tensor_methods()
    _mode = CudaToCpu()
    _mode.__enter__()


def _replace_queries() -> None:
    cuda = torch.cuda
    # mappings.py, layers.py, router.py, param_and_grad_buffer.py, distrib_optimizer.py and others.
    replace(cuda, "current_device", lambda: CPU)
    # initialize.py makes model-parallel groups and seeds only when there is a device.
    replace(cuda, "device_count", lambda: 1)
    replace(cuda, "set_device", _no_op())
    # common_utils.py (report of the device) and arguments.py (checks of the architecture).
    replace(cuda, "get_device_properties", _device_properties)
    replace(cuda, "get_device_capability", lambda device=None: (8, 0))
    replace(cuda, "get_device_name", lambda device=None: "cpu")
    # tensor_parallel/random.py sets the generator's state through _lazy_call.
    replace(cuda, "_lazy_init", _no_op())
    replace(cuda, "_lazy_call", lambda callable, **kwargs: callable())
    # timers.py, p2p_communication.py, filesystem_async.py; initialize.py, training.py, checkpointing.py.
    replace(cuda, "synchronize", _no_op())
    replace(cuda, "empty_cache", _no_op())
    # common_utils.py and training.py log them.
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        replace(cuda, name, lambda device=None: 0)
    if hasattr(cuda, "device_memory_used"):  # newer than torch 2.6
        replace(cuda, "device_memory_used", lambda device=None: 0)
    replace(cuda, "memory_stats", _memory_stats)
    # core/utils.py marks ranges for the profiler.
    for name in ("range_push", "range_pop"):
        replace(cuda.nvtx, name, _no_op())


def _replace_tensor_methods() -> None:
    tensor = torch.Tensor
    # pretrain_gpt.py, dist_utils.py, language_module.py; training.py for modules.
    replace(tensor, "cuda", lambda self, *args, **kwargs: self)
    replace(torch.nn.Module, "cuda", lambda self, device=None: self)
    replace(tensor, "record_stream", _no_op())
    replace(tensor, "pin_memory", lambda self, *args, **kwargs: self)
    replace(tensor, "type", _tensor_type(tensor.type))


def _tensor_type(convert):
    """`Tensor.type` whose name, asked without arguments, is that of the same dtype on CUDA."""

    def type(self, dtype=None, non_blocking=False, **kwargs):
        if dtype is None:
            return _CUDA_TYPE_NAMES[self.dtype]
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return convert(self, dtype, non_blocking, **kwargs)

    return type


def _device_properties(device=None):
    return types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=1, uuid="cpu"
    )


class _Zeros(dict):
    """Every statistic of a CUDA allocator that does not exist is zero."""

    def __missing__(self, key):
        return 0


def _memory_stats(device=None) -> dict[str, int]:
    return _Zeros()


def _no_op():
    """A new function each time: torch.dynamo refuses one function object under two names of torch."""

    def nothing(*args, **kwargs) -> None:
        return None

    return nothing
