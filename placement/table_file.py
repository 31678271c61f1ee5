"""The prediction tables of a placement on disk: an `.npz` of the same stem beside the placement file.

Tables name ranks, so they hold for one placement only: they carry its digest.
"""

import io
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from placement.file import Placement, write_atomically
from placement.prediction import LayerTables

_VERSION = 2
_DAMAGED = (OSError, ValueError, EOFError, BadZipFile, TypeError)  # a lone array is no archive: TypeError


def save_tables(path, tables: list[LayerTables | None], placement: Placement) -> None:
    """Writes tables beside their placement as `.npz`, whole or not at all. Arrays are named `<field>_<index>`."""
    arrays = {"version": np.int64(_VERSION), "placement": np.array(placement.digest)}
    for index, layer in enumerate(tables):
        if layer is None:
            continue
        for name in ("previous", "before", "pair_keys", "pair_tables", "chance"):
            arrays[f"{name}_{index}"] = getattr(layer, name)
        arrays[f"held_out_{index}"] = np.array([layer.held_out_locality, layer.held_out_chance])
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(path, buffer.getvalue())


def is_tables(path) -> bool:
    """True when the file there was written by `save_tables`, in any version."""
    try:
        with np.load(path) as stored:
            return "version" in stored.files
    except _DAMAGED:
        return False


def load_tables(path, placement: Placement) -> list[LayerTables | None] | None:
    """Tables of a placement, one entry per stored layer; None when there is no such file.

    Raises ValueError naming file, found and wanted when they are not this placement's.
    """
    path = Path(path)
    if not path.is_file():
        return None
    try:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except _DAMAGED as error:
        raise ValueError(f"prediction tables {path}: damaged ({error}); fit the placement again") from None
    version = arrays.get("version")
    if version != _VERSION:
        raise ValueError(
            f"prediction tables {path}: version is {version}, this package reads {_VERSION}; fit the placement "
            "again, or remove them to evaluate rows and load alone"
        )
    if arrays.get("placement") != placement.digest:
        raise ValueError(
            f"prediction tables {path}: found those of another placement than {placement.path or 'this one'}, wanted "
            "those written by the same fit; copy both files together, or fit the placement again"
        )
    return [_layer_from(arrays, index) for index in range(len(placement.layers))]


def _layer_from(arrays, index) -> LayerTables | None:
    if f"previous_{index}" not in arrays:
        return None
    return LayerTables(
        arrays[f"previous_{index}"],
        arrays[f"before_{index}"],
        arrays[f"pair_keys_{index}"],
        arrays[f"pair_tables_{index}"],
        arrays[f"chance_{index}"],
        *map(float, arrays[f"held_out_{index}"]),
    )
