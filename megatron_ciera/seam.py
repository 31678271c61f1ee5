"""Wrapping functions of the host, in the open: idempotent, checked against the signature they were made for."""

import inspect
from collections.abc import Callable
from types import ModuleType

from megatron_ciera.errors import ConfigurationError

_MARK = "_megatron_ciera_original"


def wrap(owner: ModuleType | type, name: str, parameters: tuple[str, ...], make: Callable) -> None:
    """Replaces `owner.name` by `make(original)` once.

    Args:
        owner: module or class of the host.
        name: attribute to replace.
        parameters: the first parameters that the original must have, in order.
        make: takes the original, returns the replacement.

    Raises:
        ConfigurationError: the host has no such function or another signature.
    """
    original = getattr(owner, name, None)
    if original is None:
        raise _changed(owner, name, "it is not there")
    if hasattr(original, _MARK):
        return
    found = tuple(inspect.signature(original).parameters)
    if found[: len(parameters)] != parameters:
        raise _changed(
            owner, name, f"its parameters are ({', '.join(found)}), not ({', '.join(parameters)}, …)"
        )
    replacement = make(original)
    setattr(replacement, _MARK, original)
    replacement.__name__ = getattr(original, "__name__", name)
    replacement.__signature__ = inspect.signature(original)
    setattr(owner, name, replacement)


def _changed(owner, name: str, why: str) -> ConfigurationError:
    where = getattr(owner, "__name__", str(owner))
    return ConfigurationError(
        f"{where}.{name}: this Megatron-Core differs from the versions megatron-ciera was made for (0.19.x): {why}. "
        "Use megatron-core 0.19.0 to 0.19.2, or set MEGATRON_CIERA_DISABLE=1 to run without our flags."
    )
