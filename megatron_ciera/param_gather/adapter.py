"""Where the gather meets Megatron: bucket groups and optimizers as they are in a running job.

Nothing of Megatron is imported or replaced as a class: methods are set on the instances that `pretrain` built.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ciera.param_gather.layout import ClassRun, parameter_class
from megatron_ciera.param_gather.transfer import Nothing

SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class FoundGroup:
    """A bucket group of a DDP chunk, and why it stays raw for good (None: it does not)."""

    name: str
    expert: bool
    bucket_group: object
    raw_reason: str | None

    @property
    def process_group(self):
        return self.bucket_group.intra_distributed_optimizer_instance_group

    @property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    @property
    def device(self) -> torch.device:
        return self.bucket_group.buckets[0].grad_data.device

    @property
    def num_bytes(self) -> int:
        """What a plain gather moves into each rank's buffers, own shards included."""
        return sum(
            bucket.param_data.nbytes for bucket in self.bucket_group.buckets if bucket.param_data is not None
        )


def find_groups(model_chunks: list) -> list[FoundGroup]:
    """All bucket groups of this rank, in the order in which they are gathered.

    With the gather overlapped, Megatron starts at the end of each list: buckets are filled from the model's end.
    """
    found = []
    names = parameter_names(model_chunks)
    for chunk, ddp in enumerate(model_chunks):
        for expert, groups in ((False, ddp.bucket_groups), (True, ddp.expert_parallel_bucket_groups)):
            numbered = list(enumerate(groups))
            for index, group in reversed(numbered) if ddp.ddp_config.overlap_param_gather else numbered:
                name = f"chunk {chunk}, {'expert' if expert else 'dense'} bucket {index}"
                reason = _raw_reason(group) or _model_reason(ddp, group, names)
                found.append(FoundGroup(name, expert, group, reason))
    return found


def _raw_reason(group) -> str | None:
    config = group.ddp_config
    if not config.use_distributed_optimizer:
        return "the layer-wise optimizer gathers parameters of uneven sizes"
    if config.reuse_grad_buf_for_mxfp8_param_ag:
        return "--reuse-grad-buf-for-mxfp8-param-ag: the gathered buffer does not outlive the step"
    for bucket in group.buckets:
        if bucket.param_data is None or bucket.param_data.dtype not in SUPPORTED_DTYPES:
            kind = getattr(bucket.param_data, "dtype", "none")
            return f"parameter buffer of {kind}: fp8 and fp4 values are gathered as they are"
    if group.intra_distributed_optimizer_instance_size == 1:
        return "a group of one rank: there is nothing to gather"
    return None


def _model_reason(ddp, group, names: dict) -> str | None:
    if getattr(ddp.config, "cuda_graph_impl", None) == "full_iteration":
        return "--cuda-graph-impl full_iteration: the gather is captured in the graph, which takes no host decisions"
    if getattr(ddp.config, "qk_clip", False):
        kinds = {parameter_class(names[param]) for bucket in group.buckets for param in bucket.params_list}
        if "attention" in kinds:
            return "--qk-clip rewrites attention weights on every rank after the step"
    return None


def uses_registered_buffers(model_chunks: list) -> bool:
    """Whether Megatron registered its parameter buffers with NCCL (`--use-nccl-ub`)."""
    return any(getattr(ddp.ddp_config, "nccl_ub", False) for ddp in model_chunks)


def parameter_runs(bucket, names: dict) -> list[ClassRun]:
    """Where which class of parameters lies in a bucket."""
    return [
        ClassRun(start, end, parameter_class(names[param]))
        for param, (start, end) in bucket.param_to_index.items()
    ]


def parameter_names(model_chunks: list) -> dict:
    return {param: name for chunk in model_chunks for name, param in chunk.named_parameters()}


def find_optimizers(optimizer) -> Iterator:
    """The distributed optimizers in `optimizer`, in the order in which they step."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is not None:
        for each in chained:
            yield from find_optimizers(each)
    elif getattr(optimizer, "buffers", None):
        yield optimizer


def replace_gather(bucket_group, start: Callable[[], list]) -> None:
    """Puts `start` in the place of the collective in this bucket group's `start_param_sync`.

    What Megatron promises around it stays: a forced sync with a gather outstanding only finishes that; a gather that
    is not forced leaves a handle if `overlap_param_gather`; post-processing runs once.

    Args:
        start: starts the gathers of the group's buckets and returns their handles.
    """

    def start_param_sync(force_sync: bool = False) -> None:
        overlap = bucket_group.ddp_config.overlap_param_gather
        if force_sync and bucket_group.param_gather_handle is not None:
            bucket_group.param_gather_handle.wait()
            bucket_group.param_gather_handle = None
            bucket_group._post_param_sync()
            return
        assert bucket_group.param_gather_handle is None, "a parameter gather of this bucket is outstanding"
        with torch.no_grad():
            handle = _Handles(start())
            if overlap and not force_sync:
                bucket_group.param_gather_handle = handle
            else:
                handle.wait()
        if force_sync and overlap:
            bucket_group._post_param_sync()
        bucket_group.param_gather_dispatched = True

    bucket_group.start_param_sync = start_param_sync


def skip_gather(bucket_group) -> None:
    """A group of one rank: `start_param_sync` keeps its promises without a collective."""
    replace_gather(bucket_group, lambda: [Nothing()])


def count_gather(bucket_group, count: Callable[[], None]) -> None:
    """Calls `count` before each of Megatron's own gathers of this group."""
    original = bucket_group.start_param_sync

    def start_param_sync(force_sync: bool = False) -> None:
        if not (force_sync and bucket_group.param_gather_handle is not None):
            count()
        original(force_sync)

    bucket_group.start_param_sync = start_param_sync


def around_step(optimizer, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Calls `before` and `after` around the part of the step that writes parameters; a skipped step has neither."""
    original = optimizer.step_with_ready_grads

    def step_with_ready_grads():
        before()
        result = original()
        after()
        return result

    optimizer.step_with_ready_grads = step_with_ready_grads


def after_call(owner, name: str, then: Callable[[], None]) -> None:
    """Calls `then` after each call of the method `name` of this instance."""
    original = getattr(owner, name)

    def replacement(*args, **kwargs):
        result = original(*args, **kwargs)
        then()
        return result

    setattr(owner, name, replacement)


class _Handles:
    """The handles of all buckets of a group."""

    def __init__(self, handles: list):
        self._handles = handles

    def wait(self) -> None:
        with torch.no_grad():
            for handle in self._handles:
                handle.wait()
