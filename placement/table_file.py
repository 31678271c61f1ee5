"""The prediction tables of a placement on disk: an `.npz` of the same stem beside the placement file."""

import io
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from placement.file import write_atomically
from placement.prediction import LayerTables

_VERSION = 1


def save_tables(path, tables: list[LayerTables | None]) -> None:
    """Writes tables beside a placement as `.npz`, whole or not at all. Arrays are named `<field>_<index>`."""
    arrays = {"version": np.int64(_VERSION), "num_layers": np.int64(len(tables))}
    for index, layer in enumerate(tables):
        if layer is None:
            continue
        for name in ("previous", "before", "pair_keys", "pair_tables", "chance"):
            arrays[f"{name}_{index}"] = getattr(layer, name)
        arrays[f"held_out_{index}"] = np.array([layer.held_out_locality, layer.held_out_chance])
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomically(path, buffer.getvalue())


def load_tables(path, placement) -> list[LayerTables | None] | None:
    """Tables of a placement, one entry per stored layer; None when there is no such file.

    Raises ValueError naming file, layer, found and wanted when they are not this placement's.
    """
    path = Path(path)
    if not path.is_file():
        return None
    try:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ValueError(f"prediction tables {path}: damaged ({error}); fit the placement again") from None
    found = (int(arrays.get("version", -1)), int(arrays.get("num_layers", -1)))
    if found != (_VERSION, len(placement.layers)):
        raise ValueError(
            f"prediction tables {path}: version and layers are {found}, wanted "
            f"{(_VERSION, len(placement.layers))}; fit the placement again"
        )
    return [_layer_from(arrays, index, path, placement) for index in range(len(placement.layers))]


def _layer_from(arrays, index, path, placement) -> LayerTables | None:
    if f"previous_{index}" not in arrays:
        return None
    wanted = (placement.num_experts, placement.expert_parallel_size)
    if arrays[f"previous_{index}"].shape != wanted:
        raise ValueError(
            f"prediction tables {path}: {placement.layers[index].layer_id}: shape "
            f"{arrays[f'previous_{index}'].shape}, wanted {wanted}; fit the placement again"
        )
    return LayerTables(
        arrays[f"previous_{index}"],
        arrays[f"before_{index}"],
        arrays[f"pair_keys_{index}"],
        arrays[f"pair_tables_{index}"],
        arrays[f"chance_{index}"],
        *map(float, arrays[f"held_out_{index}"]),
    )
