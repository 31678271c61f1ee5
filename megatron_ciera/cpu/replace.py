"""Putting a stand-in in the place of one attribute of torch or Megatron."""

from typing import Any

from megatron_ciera.errors import ConfigurationError


def replace(owner: Any, name: str, stand_in: Any) -> None:
    """Set `owner.name`, which must exist, to `stand_in`. Raises ConfigurationError if it does not exist."""
    if not hasattr(owner, name):
        raise ConfigurationError(
            f"{getattr(owner, '__name__', owner)}.{name}: found nothing of that name, which the CPU layer "
            "replaces. Use torch >= 2.6 and megatron-core >= 0.19, < 0.20."
        )
    setattr(owner, name, stand_in)
