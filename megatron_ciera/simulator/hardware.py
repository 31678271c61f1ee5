"""What one GPU does in a second: published peaks, and the shares of them that training reaches."""

from dataclasses import dataclass, replace

from megatron_ciera.cluster import Cluster
from megatron_ciera.errors import refuse

# Dense bf16 peak in FLOP/s and memory in bytes, from the vendors' data sheets. CPU: one slow core, for tests.
_GPUS = {
    "A100-80GB": (312e12, 80e9),
    "H100": (989e12, 80e9),
    "H200": (989e12, 141e9),
    "B200": (2250e12, 180e9),
    "MI300X": (1307e12, 192e9),
    "CPU": (2e10, 4e9),
}

# Entropy coding measured on an H200 (4800 GB/s): nvCOMP ANS, 64 KiB chunks, one symbol a value. Elsewhere in
# proportion to memory bandwidth.
_CODEC_MEMORY_BANDWIDTH = 4800.0
_ENCODE_VALUES, _DECODE_VALUES = 677e9, 1066e9
_CODEC_LAUNCH = 20e-6


@dataclass(frozen=True)
class Hardware:
    """flops: FLOP/s that matrix products reach. memory: bytes/s that elementwise work reaches. capacity: bytes.
    launch: seconds that one kernel takes at least. encode, decode: values/s of the codec."""

    flops: float
    memory: float
    capacity: float
    launch: float
    encode: float
    decode: float
    codec_launch: float = _CODEC_LAUNCH

    def with_codec(self, encode_gb_s: float | None, decode_gb_s: float | None) -> "Hardware":
        """With measured codec speeds, raw bf16 GB/s as scripts/bench_codec.py prints them; None: as it is."""
        return replace(
            self,
            encode=self.encode if encode_gb_s is None else encode_gb_s * 1e9 / 2,
            decode=self.decode if decode_gb_s is None else decode_gb_s * 1e9 / 2,
        )

    def seconds(self, flops: float, num_bytes: float, kernels: int) -> float:
        """Matrix products, then elementwise passes; or launching their kernels, if that takes longer."""
        return max(flops / self.flops + num_bytes / self.memory, kernels * self.launch)


def hardware(cluster: Cluster, efficiency: float = 0.45, memory_efficiency: float = 0.8) -> Hardware:
    """The GPU that `cluster` names.

    Raises:
        ConfigurationError: its peak is not known here.
    """
    if cluster.gpu not in _GPUS:
        raise refuse("cluster.gpu", cluster.gpu, f"one of {', '.join(_GPUS)}", "Name the nearest of them.")
    peak, capacity = _GPUS[cluster.gpu]
    scale = cluster.memory_bandwidth_gb_s / _CODEC_MEMORY_BANDWIDTH
    return Hardware(
        flops=peak * efficiency,
        memory=cluster.memory_bandwidth_gb_s * 1e9 * memory_efficiency,
        capacity=capacity,
        launch=5e-6,
        encode=_ENCODE_VALUES * scale,
        decode=_DECODE_VALUES * scale,
    )
