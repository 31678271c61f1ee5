"""The `cluster:` section of a YAML config: what the hardware is."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_ciera.errors import ConfigurationError


@dataclass(frozen=True)
class Link:
    """One level of the network. Bandwidth in GB/s (bytes) per GPU and direction, latency in µs.

    bandwidth_gb_s is what a large all-gather moves. Where reductions or all-to-alls are known to move less (or
    more), reduce_gb_s and all_to_all_gb_s say so; scripts/measure_links.py measures all three.
    """

    bandwidth_gb_s: float
    latency_us: float
    reduce_gb_s: float | None = None
    all_to_all_gb_s: float | None = None


@dataclass(frozen=True)
class Cluster:
    """Hardware of a run: `nodes` nodes of `gpus_per_node` GPUs; memory bandwidth in GB/s."""

    gpu: str
    nodes: int
    gpus_per_node: int
    memory_bandwidth_gb_s: float
    intra_node: Link
    inter_node: Link


_LINK_KEYS = {"bandwidth_gb_s": float, "latency_us": float}
_OPTIONAL_LINK_KEYS = {"reduce_gb_s": float, "all_to_all_gb_s": float}
_CLUSTER_KEYS = {
    "gpu": str,
    "nodes": int,
    "gpus_per_node": int,
    "memory_bandwidth_gb_s": float,
    "intra_node": Link,
    "inter_node": Link,
}


def cluster_from_mapping(section: Mapping, source: str) -> Cluster:
    """Checks and converts the `cluster:` section of `source` (a file name, for messages).

    Raises:
        ConfigurationError: a key is unknown or missing, or a value is not a positive number.
    """
    return Cluster(**_convert(section, _CLUSTER_KEYS, f"{source}: cluster"))


def _convert(section: Mapping, wanted: dict, where: str, optional: Mapping = MappingProxyType({})) -> dict:
    if not isinstance(section, Mapping):
        raise ConfigurationError(
            f"{where}: found {section!r}, needs a mapping with the keys {', '.join(wanted)}."
        )
    known = {**wanted, **optional}
    for key in section:
        if key not in known:
            raise ConfigurationError(
                f"{where}: unknown key {key!r}. Known keys: {', '.join(known)}. Remove or correct it."
            )
    missing = [key for key in wanted if key not in section]
    if missing:
        raise ConfigurationError(f"{where}: {', '.join(missing)} missing. Add it, or leave out the section.")
    return {key: _value(value, known[key], f"{where}.{key}") for key, value in section.items()}


def _value(value: object, kind: type, where: str):
    if kind is Link:
        return Link(**_convert(value, _LINK_KEYS, where, _OPTIONAL_LINK_KEYS))
    if kind is str:
        return str(value)
    try:
        number = kind(value)
    except (TypeError, ValueError):
        number = 0
    if not number > 0:
        raise ConfigurationError(f"{where}: found {value!r}, needs a positive number. Correct it.")
    return number
