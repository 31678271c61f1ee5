"""Process groups for two hops: across nodes between ranks with the same place in their node, then inside."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class NodeGroups:
    """`across`: this rank's partners, one on each node, by node. `inside`: the ranks of its own node."""

    across: dist.ProcessGroup
    inside: dist.ProcessGroup


def places(ranks: list[int], ranks_per_host: int) -> list[list[int]] | None:
    """Global ranks of an expert-parallel group -> the same by node; None where two hops are of no use.

    That is: all on one node, one on each node, unequal shares, or an order that is not by node, so that a
    node's experts would not be neighbours.
    """
    nodes = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_host, []).append(rank)
    by_node = list(nodes.values())
    sizes = {len(node) for node in by_node}
    in_order = [rank for node in by_node for rank in node] == list(ranks)
    if len(by_node) < 2 or len(sizes) > 1 or sizes == {1} or not in_order:
        return None
    return by_node


def make_node_groups(expert_group: dist.ProcessGroup, ranks_per_host: int) -> NodeGroups | None:
    """Makes the groups, or none of them on any rank if one expert-parallel group does not allow it. Collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dist.get_process_group_ranks(expert_group))
    arranged = [places(ranks, ranks_per_host) for ranks in sorted({tuple(ranks) for ranks in everyone})]
    if any(by_node is None for by_node in arranged):
        return None
    mine, inside, across = dist.get_rank(), None, None
    for by_node in arranged:
        for node in by_node:
            made = dist.new_group(node)
            inside = made if mine in node else inside
        for rail in zip(*by_node, strict=True):
            made = dist.new_group(list(rail))
            across = made if mine in rail else across
    return NodeGroups(across, inside)
