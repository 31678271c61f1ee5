"""Reads `.npz` traces: an array `top_indices` (or a named one) of shape [layers, tokens, topk].

Row i is the i-th MoE layer of the model, in order. Large arrays are unpacked to a temporary file and mapped,
so memory stays bounded.
"""

import re
import shutil
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from placement.file import DECODER, LayerId
from placement.load_file import LOAD_NAMES, LOAD_ONLY_REASON

_BLOCK_TOKENS = 65536
_SPOOL_BYTES = 1 << 28


class ArrayTrace:
    """One or more `.npz` files with the same layers, read one after the other."""

    source_layers = "moe_order"
    ranks = ()

    def __init__(self, paths, array: str | None = None):
        self.paths = [Path(path) for path in paths]
        self.source = ", ".join(path.name for path in self.paths)
        self.array = [_choose_array(path, array) for path in self.paths]
        shapes = [_read_header(path, name)[0] for path, name in zip(self.paths, self.array, strict=True)]
        for path, shape in zip(self.paths, shapes, strict=True):
            if shape[0] != shapes[0][0] or shape[2] != shapes[0][2]:
                raise ValueError(
                    f"trace {path}: shape {list(shape)} does not go with {self.paths[0]} {list(shapes[0])}: "
                    "layers and topk must be equal; give traces of one model"
                )
        self.layer_ids = tuple(LayerId(DECODER, layer) for layer in range(shapes[0][0]))
        self.num_tokens = sum(shape[1] for shape in shapes)
        step = re.fullmatch(r"step(\d+)", self.array[-1])
        self.iteration = int(step.group(1)) if step else None
        self.notes = []

    def check_damage(self) -> None:
        """An array is read whole or not at all: nothing to check."""

    def blocks(self):
        """Yields [layers, tokens, topk] arrays of at most 65,536 tokens."""
        for path, name in zip(self.paths, self.array, strict=True):
            with tempfile.TemporaryDirectory(prefix="placement-trace-") as folder:
                values = _open_array(path, name, folder)
                for start in range(0, values.shape[1], _BLOCK_TOKENS):
                    yield np.array(values[:, start : start + _BLOCK_TOKENS])
                del values


def _choose_array(path: Path, array: str | None) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
    except zipfile.BadZipFile:
        raise ValueError(
            f"trace {path}: not an .npz file (damaged or half-written); write it again"
        ) from None
    wanted = array or "top_indices"
    if wanted not in names:
        load_only = [name for name in names if name in LOAD_NAMES]
        if load_only and not array:
            raise ValueError(f"trace {path}: holds only expert loads ({load_only[0]}): {LOAD_ONLY_REASON}")
        option = f"--array {array}" if array else "no --array given and no top_indices"
        raise ValueError(f"trace {path}: {option}: the file has {', '.join(names) or 'no arrays'}; name one")
    return wanted


def _read_header(path: Path, name: str):
    with zipfile.ZipFile(path) as archive, archive.open(name + ".npy") as stream:
        shape, fortran, dtype = _header(stream)
    where = f"trace {path}, array {name}"
    if len(shape) != 3:
        raise ValueError(f"{where}: shape {list(shape)}, wanted [layers, tokens, topk]")
    if not np.issubdtype(dtype, np.integer):
        raise ValueError(f"{where}: dtype {dtype}, wanted integers (expert numbers)")
    if fortran:
        raise ValueError(f"{where}: Fortran order, wanted C order; save np.ascontiguousarray of it")
    if 0 in shape:
        raise ValueError(f"{where}: empty, shape {list(shape)}; record at least one training step")
    return shape, dtype


def _header(stream):
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


def _open_array(path: Path, name: str, folder: str) -> np.ndarray:
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.getinfo(name + ".npy").file_size <= _SPOOL_BYTES:
                with archive.open(name + ".npy") as stream:
                    return np.lib.format.read_array(stream)
            spooled = Path(folder) / "array.npy"
            with archive.open(name + ".npy") as stream, open(spooled, "wb") as out:
                shutil.copyfileobj(stream, out, 1 << 22)
            return np.load(spooled, mmap_mode="r")
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ValueError(f"trace {path}, array {name}: damaged ({error}); write it again") from None
