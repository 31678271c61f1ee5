"""What a collective costs one GPU: latency, and bytes over its ports, by level of the network.

Every GPU has one port inside the node and one NIC, each with the bandwidth of the `cluster:` section in each
direction. All ranks of a group do the same, so one GPU stands for all. Reductions and all-to-alls that reach another
rate on a link count as so many more bytes of it.
"""

from dataclasses import dataclass

from megatron_ciera.cluster import Cluster, Link

INTRA, INTER = "intra", "inter"


@dataclass(frozen=True)
class Group:
    """A process group: its ranks, and how many of them share a node."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        return -(-self.size // self.per_node)


def strided(size: int, stride: int, gpus_per_node: int) -> Group:
    """The group of `size` ranks that are `stride` apart, on nodes filled in rank order."""
    return Group(size, min(size, max(1, gpus_per_node // stride)))


@dataclass(frozen=True)
class Cost:
    """Seconds of latency and bytes over this GPU's ports."""

    seconds: float = 0.0
    intra: float = 0.0
    inter: float = 0.0

    @property
    def traffic(self) -> dict[str, float]:
        """Without the links that carry nothing."""
        return {link: amount for link, amount in ((INTRA, self.intra), (INTER, self.inter)) if amount > 0}

    def alone(self, cluster: Cluster) -> float:
        """Seconds with both ports to itself."""
        times = [amount / links(cluster)[link] for link, amount in self.traffic.items()]
        return self.seconds + max(times, default=0.0)


def links(cluster: Cluster) -> dict[str, float]:
    """Bytes/s of a GPU's ports."""
    return {INTRA: cluster.intra_node.bandwidth_gb_s * 1e9, INTER: cluster.inter_node.bandwidth_gb_s * 1e9}


def ring(cluster: Cluster, group: Group, num_bytes: float, rounds: int = 1, reduces: bool = False) -> Cost:
    """All-gather, or with `reduces` reduce-scatter, of `num_bytes` in total; `rounds=2`: all-reduce.

    Each GPU passes on all but its own part: bytes × (W - 1) / W over its port inside the node. Rings enter a node
    through the NICs of all its members, so a NIC carries that divided by the members on its node. Latency: one step
    for each neighbour inside the node and each further node.
    """
    if group.size == 1:
        return Cost()
    moved = rounds * num_bytes * (group.size - 1) / group.size
    seconds = _ring_latency(cluster, group) * rounds
    intra = moved if group.per_node > 1 else 0.0
    inter = moved / group.per_node if group.nodes > 1 else 0.0
    if reduces:
        intra *= _slowdown(cluster.intra_node, cluster.intra_node.reduce_gb_s)
        inter *= _slowdown(cluster.inter_node, cluster.inter_node.reduce_gb_s)
    return Cost(seconds, intra, inter)


def all_to_all(cluster: Cluster, group: Group, num_bytes: float) -> Cost:
    """`num_bytes` leave each GPU, spread evenly over the other ranks of the group."""
    if group.size == 1:
        return Cost()
    near = (group.per_node - 1) / (group.size - 1)
    seconds = cluster.intra_node.latency_us if group.nodes == 1 else cluster.inter_node.latency_us
    inside = num_bytes * near * _slowdown(cluster.intra_node, cluster.intra_node.all_to_all_gb_s)
    between = num_bytes * (1 - near) * _slowdown(cluster.inter_node, cluster.inter_node.all_to_all_gb_s)
    return Cost(seconds * 1e-6, inside, between)


def point_to_point(cluster: Cluster, same_node: bool, num_bytes: float) -> Cost:
    """One message to a neighbour."""
    if same_node:
        return Cost(cluster.intra_node.latency_us * 1e-6, num_bytes, 0.0)
    return Cost(cluster.inter_node.latency_us * 1e-6, 0.0, num_bytes)


def _slowdown(link: Link, rate: float | None) -> float:
    """How many bytes of the link's own rate one byte at `rate` (GB/s; None: the link's own) stands for."""
    return 1.0 if rate is None else link.bandwidth_gb_s / rate


def _ring_latency(cluster: Cluster, group: Group) -> float:
    steps = (group.per_node - 1) * cluster.intra_node.latency_us
    return (steps + (group.nodes - 1) * cluster.inter_node.latency_us) * 1e-6
