"""What gloo's collectives take less of than NCCL's: split sizes as tensors, and lists of unequal tensors."""

import torch
import torch.distributed as dist

from megatron_ciera.seam import wrap


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
    """Wrap torch.distributed's all_to_all_single, all_gather and reduce_scatter; same arguments."""
    splits = ("output", "input", "output_split_sizes", "input_split_sizes", "group", "async_op")
    wrap(dist, "all_to_all_single", splits, _with_tensor_split_sizes)
    wrap(dist, "all_gather", ("tensor_list", "tensor", "group", "async_op"), _with_uneven_outputs)
    wrap(dist, "reduce_scatter", ("output", "input_list", "op", "group", "async_op"), _with_uneven_inputs)


def _with_tensor_split_sizes(original):
    """Split sizes may be tensors.

    mappings.py passes them as moe_utils.maybe_move_tensor_to_cpu left them: tensors, when not `is_cuda`.
    """

    def all_to_all_single(
        output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False
    ):
        sizes = _as_list(output_split_sizes), _as_list(input_split_sizes)
        return original(output, input, *sizes, group, async_op)

    return all_to_all_single


def _with_uneven_outputs(original):
    """The tensors of the list may differ in shape: then one broadcast for each rank.

    mappings.py needs it when the experts are tensor-parallel. Every rank must pass the same shapes, so all
    ranks choose the same way.
    """

    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if _are_even(tensor_list):
            return original(tensor_list, tensor, group, async_op)
        group = group or dist.group.WORLD
        tensor_list[group.rank()].copy_(tensor)
        works = [
            dist.broadcast(part, group=group, group_src=rank, async_op=True)
            for rank, part in enumerate(tensor_list)
            if part.numel() > 0
        ]
        return _finish(works, async_op)

    return all_gather


def _with_uneven_inputs(original):
    """The tensors of the list, which is left as it is, may differ in shape: then one reduce to each rank.

    mappings.py needs it when the experts are tensor-parallel.
    """

    def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if _are_even(input_list):
            return original(output, input_list, op, group, async_op)
        group = group or dist.group.WORLD
        works = []
        for rank, part in enumerate(input_list):
            if part.numel() > 0:
                # gloo uses the buffers of all ranks as scratch.
                buffer = output.copy_(part) if rank == group.rank() else part.clone()
                works.append(dist.reduce(buffer, op=op, group=group, group_dst=rank, async_op=True))
        return _finish(works, async_op)

    return reduce_scatter


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
