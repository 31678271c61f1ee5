"""The parameter gather of one bucket, raw or coded: bytes, codec times, pieces, and whether coding pays.

A coded bucket travels in pieces: while one is on the wire the next is encoded and the one before decoded.
"""

from dataclasses import dataclass

from megatron_ciera.cluster import Cluster
from megatron_ciera.simulator.features import ChangeRates, Features
from megatron_ciera.simulator.hardware import Hardware
from megatron_ciera.simulator.network import Cost, Group, ring

_BF16_BITS = 16
_PIECES = (1, 2, 4, 8)
SIZE_BYTES = 64.0  # that every rank sends before a piece
_LEAST_VALUES = 1 << 20  # of a rank's part of a piece, when there are several


@dataclass(frozen=True)
class Gather:
    """One bucket, of `pieces` pieces. cost, encode, decode: of one piece; seconds (0 if raw). ratio: bytes sent over
    raw bytes."""

    kind: str
    values: int
    cost: Cost
    encode: float
    decode: float
    ratio: float
    pieces: int = 1

    @property
    def coded(self) -> bool:
        return self.ratio < 1

    def alone(self, cluster: Cluster, exchange: float) -> float:
        """Seconds with links and codec to itself; `exchange`: of the sizes of a piece."""
        wire = self.cost.alone(cluster)
        slowest = max(self.encode, wire, self.decode)
        return self.encode + exchange + wire + self.decode + (self.pieces - 1) * slowest


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
    exchange = ring(cluster, group, SIZE_BYTES * group.size).alone(cluster)
    share = values / group.size
    most = max(1, int(share) // _LEAST_VALUES)
    coded = [
        Gather(
            kind,
            values,
            ring(cluster, group, 2.0 * values * ratio / pieces),
            gpu.codec_launch + share / pieces / gpu.encode,
            gpu.codec_launch + share / pieces * (group.size - 1) / gpu.decode,
            ratio,
            pieces,
        )
        for pieces in _PIECES
        if pieces == 1 or pieces <= most
    ]
    best = min(coded, key=lambda gather: gather.alone(cluster, exchange))
    if ratio >= 1 or (features.selection and best.alone(cluster, exchange) >= raw.alone(cluster)):
        return plain
    return best
