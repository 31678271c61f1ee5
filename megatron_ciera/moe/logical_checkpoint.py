"""Experts named by logical number in checkpoints, whatever slot they are in.

Megatron numbers an expert by its slot: as the offset along an axis of its own, or (singleton shards) in the key.
Both are rewritten on the finished entries. Factories (gated units split in two) are rewritten in what they
build, so that optimizer states, which Megatron derives from the model's entries, follow.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory

_SINGLETON = re.compile(r"(?<=experts\.)\d+(?=\.)")


def save_logically(experts: torch.nn.Module, physical_to_logical_map: torch.Tensor) -> None:
    """Makes `experts.sharded_state_dict` use logical numbers. The map is read at each call. Once per module."""
    by_slot = experts.sharded_state_dict

    def sharded_state_dict(prefix="", sharded_offsets=(), metadata=None):
        entries = by_slot(prefix, sharded_offsets, metadata)
        mapping = physical_to_logical_map.tolist()
        return relabel(entries, len(sharded_offsets), mapping.__getitem__, (metadata or {}))

    experts.sharded_state_dict = sharded_state_dict


def relabel(entries: dict, axis: int, to_logical: Callable[[int], int], metadata: dict) -> dict:
    """Rewrites expert numbers in a sharded state dict of one layer's experts.

    Args:
        entries: as `sharded_state_dict` of SequentialMLP or TEGroupedMLP returns it.
        axis: which axis of the global tensors counts experts.
        to_logical: slot -> expert.
        metadata: Megatron's checkpoint metadata; `singleton_local_shards` puts the number into keys.
    """
    if metadata.get("singleton_local_shards", False):
        return {name: _relabel_key(entry, to_logical) for name, entry in entries.items()}
    return {name: _relabel_offset(entry, axis, to_logical) for name, entry in entries.items()}


def _relabel_key(entry, to_logical):
    key = _SINGLETON.sub(lambda match: str(to_logical(int(match.group()))), entry.key, count=1)
    return replace(entry, key=key)


def _relabel_offset(entry, axis, to_logical):
    if isinstance(entry, ShardedTensorFactory):
        return replace(entry, build_fn=_relabelled_build(entry.build_fn, axis, to_logical))
    if isinstance(entry, ShardedTensor | ShardedObject):
        offset = list(entry.global_offset)
        offset[axis] = to_logical(offset[axis])
        return replace(entry, global_offset=tuple(offset))
    return entry


def _relabelled_build(build, axis, to_logical):
    def build_fn(key, data, replica_id, flattened_range):
        built = build(key, data, replica_id, flattened_range)
        return dict_list_map_inplace(lambda part: _relabel_offset(part, axis, to_logical), built)

    return build_fn
