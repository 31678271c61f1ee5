"""What gloo's collectives take less of than NCCL's: split sizes as tensors, and lists of unequal tensors."""

import torch
import torch.distributed as dist

from megatron_ciera.compat.patching import check_signature, original, replace


class _Works:
    """The handles of several collectives, waited for as one."""

    def __init__(self, works):
        self._works = works

    def wait(self, timeout=None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def install() -> None:
    """Replace torch.distributed's all_to_all_single, all_gather and reduce_scatter; same signatures."""
    check_signature(
        dist,
        "all_to_all_single",
        ("output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op"),
    )
    check_signature(dist, "all_gather", ("tensor_list", "tensor", "group", "async_op"))
    check_signature(dist, "reduce_scatter", ("output", "input_list", "op", "group", "async_op"))
    replace(dist, "all_to_all_single", _all_to_all_single)
    replace(dist, "all_gather", _all_gather)
    replace(dist, "reduce_scatter", _reduce_scatter)


def _all_to_all_single(
    output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
):
    """As torch's, with split sizes that may be tensors.

    mappings.py passes them as moe_utils.maybe_move_tensor_to_cpu left them: tensors, when not `is_cuda`.
    """
    return original(dist, "all_to_all_single")(
        output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), group, async_op
    )


def _all_gather(tensor_list, tensor, group=None, async_op=False):
    """As torch's, with a list whose tensors may differ in shape: then one broadcast for each rank.

    mappings.py needs it when the experts are tensor-parallel. Every rank must pass the same shapes, so all
    ranks choose the same way.
    """
    if _are_even(tensor_list):
        return original(dist, "all_gather")(tensor_list, tensor, group, async_op)
    group = group or dist.group.WORLD
    tensor_list[group.rank()].copy_(tensor)
    works = [
        dist.broadcast(part, group=group, group_src=rank, async_op=True)
        for rank, part in enumerate(tensor_list)
        if part.numel() > 0
    ]
    return _finish(works, async_op)


def _reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """As torch's, with a list whose tensors may differ in shape: then one reduce to each rank.

    mappings.py needs it when the experts are tensor-parallel. `input_list` is left as it is.
    """
    if _are_even(input_list):
        return original(dist, "reduce_scatter")(output, input_list, op, group, async_op)
    group = group or dist.group.WORLD
    works = []
    for rank, part in enumerate(input_list):
        if part.numel() > 0:
            # gloo uses the buffers of all ranks as scratch.
            buffer = output.copy_(part) if rank == group.rank() else part.clone()
            works.append(dist.reduce(buffer, op=op, group=group, group_dst=rank, async_op=True))
    return _finish(works, async_op)


def _finish(works, async_op: bool):
    combined = _Works(works)
    if async_op:
        return combined
    combined.wait()
    return None


def _are_even(tensors) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def _as_list(sizes):
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
