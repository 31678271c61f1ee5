"""Replacing one attribute of the host (torch or Megatron), once, and only in the version it was written for."""

import inspect
from typing import Any

_MARK = "_megatron_ciera_replacement"


def check_signature(owner: Any, name: str, expected: tuple[str, ...]) -> None:
    """Raise RuntimeError unless `owner.name` exists and takes exactly the parameters `expected`, in order."""
    where = f"{getattr(owner, '__name__', owner)}.{name}"
    target = getattr(owner, name, None)
    if target is None:
        raise RuntimeError(
            f"{where} does not exist in the installed version, a function of that name was expected; "
            "use megatron-core >= 0.19, < 0.20 and torch >= 2.6"
        )
    found = tuple(inspect.signature(target).parameters)
    if found != expected:
        raise RuntimeError(
            f"{where} takes ({', '.join(found)}), ({', '.join(expected)}) was expected; "
            "use megatron-core >= 0.19, < 0.20 and torch >= 2.6"
        )


def replace(owner: Any, name: str, replacement: Any) -> None:
    """Set `owner.name` to `replacement`, which must take its place with the same calls.

    The original stays reachable as `original(owner, name)`. A second replacement of the same attribute
    is an error: whoever wants to change it again must do so in the first one.
    """
    replaced = owner.__dict__.setdefault(_MARK, {}) if not isinstance(owner, type) else _of_class(owner)
    if name in replaced:
        raise RuntimeError(f"{getattr(owner, '__name__', owner)}.{name} is already replaced")
    replaced[name] = owner.__dict__.get(name, getattr(owner, name, None))
    setattr(owner, name, replacement)


def is_replaced(owner: Any, name: str) -> bool:
    """Whether `replace(owner, name, …)` has run."""
    return name in owner.__dict__.get(_MARK, {})


def original(owner: Any, name: str) -> Any:
    """What `owner.name` was before `replace`."""
    return owner.__dict__[_MARK][name]


def _of_class(owner: type) -> dict[str, Any]:
    if _MARK not in owner.__dict__:
        setattr(owner, _MARK, {})
    return owner.__dict__[_MARK]
