"""Where the Triton kernels run; everywhere else their torch twins do."""

import torch


def has_kernels(x: torch.Tensor) -> bool:
    """Whether kernels take this tensor."""
    return x.is_cuda
