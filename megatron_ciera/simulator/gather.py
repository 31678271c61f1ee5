"""The parameter gather of one bucket, raw or coded: bytes, codec times, and whether coding pays."""

from dataclasses import dataclass

from megatron_ciera.cluster import Cluster
from megatron_ciera.simulator.features import ChangeRates, Features
from megatron_ciera.simulator.hardware import Hardware
from megatron_ciera.simulator.network import Cost, Group, ring

_BF16_BITS = 16


@dataclass(frozen=True)
class Gather:
    """One bucket. encode, decode: seconds (0 if raw). ratio: bytes sent over raw bytes."""

    kind: str
    values: int
    cost: Cost
    encode: float
    decode: float
    ratio: float

    @property
    def coded(self) -> bool:
        return self.ratio < 1


def plan_gather(
    kind: str,
    values: int,
    group: Group,
    cluster: Cluster,
    gpu: Hardware,
    features: Features,
    rates: ChangeRates,
) -> Gather:
    """Raw or coded, by the benefit model of docs/param_gather.md with simulated instead of measured costs.

    Args:
        kind: dense or expert.
        values: bf16 values of the whole bucket.
        group: ranks that each own a shard of it.
    """
    raw = ring(cluster, group, 2.0 * values)
    plain = Gather(kind, values, raw, 0.0, 0.0, 1.0)
    if features.codec is None or group.size == 1 or values == 0:
        return plain
    ratio = rates.bits(features.codec, kind) / _BF16_BITS
    cost = ring(cluster, group, 2.0 * values * ratio)
    share = values / group.size
    encode = gpu.codec_launch + share / gpu.encode
    decode = gpu.codec_launch + share * (group.size - 1) / gpu.decode
    # Sizes are exchanged, and so the first gather waits, until everything is encoded: nothing hides that.
    gain = raw.alone(cluster) - cost.alone(cluster) - decode - encode
    if ratio >= 1 or (features.selection and gain <= 0):
        return plain
    return Gather(kind, values, cost, encode, decode, ratio)
