"""Reads files that hold expert loads only: enough for the load of ranks, not for rows or co-selection.

`logical_count` (SGLang's recorder: [steps, layers, experts] or [layers, experts]) and `weight`, `expert_load`
or `load` ([layers, experts], as EPLB takes them), in `.npz` or, read with torch, `.pt`.
"""

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

LOAD_NAMES = ("logical_count", "weight", "expert_load", "load")
LOAD_ONLY_REASON = (
    "loads say how often an expert is selected, not which are selected together, so nothing can be placed by "
    "them; record each token's experts instead (evaluate_placement.py accepts loads, for the load of ranks)"
)


@dataclass(frozen=True)
class ExpertLoads:
    """`loads`: [layers, num_experts] float64, assignments (or weights) of each expert, summed over steps."""

    loads: np.ndarray
    source: str
    name: str


def read_loads(paths) -> ExpertLoads | None:
    """The sum of load-only files; None when the first file is not one (it is a trace, or unknown).

    Raises ValueError naming file, array and what is wanted for loads that cannot be read.
    """
    paths = [Path(path) for path in paths]
    total, first_name = None, None
    for path in paths:
        name, values = _load_array(path)
        if name is None:
            if total is None:
                return None
            raise ValueError(f"trace {path}: no loads in it, {paths[0]} holds loads; give one kind at a time")
        loads = _summed(path, name, values)
        if total is not None and loads.shape != total.shape:
            raise ValueError(
                f"trace {path}: loads of shape {list(loads.shape)}, {paths[0]} has {list(total.shape)}; give "
                "loads of one model"
            )
        total = loads if total is None else total + loads
        first_name = first_name or name
    return ExpertLoads(total, ", ".join(path.name for path in paths), first_name)


def _load_array(path: Path):
    """(name, array) of the loads in a file without routed experts, (None, None) otherwise."""
    if path.suffix == ".npz" and path.is_file():
        try:
            with np.load(path) as stored:
                found = [name for name in LOAD_NAMES if name in stored.files]
                if found and "top_indices" not in stored.files:
                    return found[0], stored[found[0]]
        except (BadZipFile, ValueError, EOFError):
            pass  # the trace reader says what is wrong with it
    if path.suffix == ".pt" and path.is_file():
        content = load_torch(path)
        if isinstance(content, dict) and "records" not in content:
            found = [name for name in LOAD_NAMES if name in content]
            if found:
                return found[0], np.asarray(content[found[0]])
    return None, None


def _summed(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    """[layers, num_experts] of [layers, num_experts] or [steps, layers, num_experts]."""
    where = f"trace {path}, {name}"
    if values.ndim not in (2, 3):
        raise ValueError(
            f"{where}: shape {list(values.shape)}, wanted [layers, experts] or [steps, layers, experts]"
        )
    if not (np.issubdtype(values.dtype, np.number) and np.isfinite(values).all() and (values >= 0).all()):
        raise ValueError(f"{where}: dtype {values.dtype}, wanted finite numbers from 0")
    loads = values.astype(np.float64)
    loads = loads.sum(axis=0) if loads.ndim == 3 else loads
    if not loads.sum():
        raise ValueError(f"{where}: all loads are 0; record while the model serves tokens")
    return loads


def load_torch(path: Path):
    """The content of a `.pt` file; raises ValueError when torch is missing or cannot read it."""
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"trace {path}: reading .pt needs torch; install it or convert the dump to .npz"
        ) from None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"trace {path}: torch cannot read it ({error}); record again") from None
