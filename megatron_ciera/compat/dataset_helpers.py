"""Megatron's compiled dataset helpers: found in the wheel, made in a checkout, where neither is at hand.

`megatron.training` runs `make` in its datasets folder at every start. The megatron-core wheel ships the
module compiled and no Makefile, so that the run would exit although there is nothing to make. A source
checkout ships the Makefile, which needs a compiler and pybind11; where the wheel is installed as well and its
source is the same, its compiled module is the same and spares both.
"""

import filecmp
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from megatron_ciera.errors import refuse
from megatron_ciera.seam import wrap

_MODULE = "megatron.core.datasets.helpers_cpp"


def install() -> None:
    """Let Megatron find `helpers_cpp`, and make it only where it is not there; idempotent, on every rank.

    Raises ConfigurationError if Megatron has no `compile_helpers`.
    """
    from megatron.core import datasets
    from megatron.core.datasets import utils

    folder = Path(utils.__file__).parent
    wheel = _folder_of_wheel()
    if importlib.util.find_spec(_MODULE) is None and wheel and _is_same_source(folder, wheel):
        datasets.__path__.append(str(wheel))
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron-ciera: dataset helpers: the compiled module in {wheel}, of the same source")
    wrap(utils, "compile_helpers", (), lambda make: _compile_or_find(make, folder))


def _folder_of_wheel() -> Path | None:
    try:
        wheel = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(wheel.locate_file("megatron/core/datasets")))


def _is_same_source(folder: Path, wheel: Path) -> bool:
    sources = [place / "helpers.cpp" for place in (folder, wheel)]
    return all(source.is_file() for source in sources) and filecmp.cmp(*sources, shallow=False)


def _compile_or_find(make, folder: Path):
    def compile_helpers() -> None:
        found = importlib.util.find_spec(_MODULE)
        is_made_here = found is None or Path(found.origin).parent == folder
        if is_made_here and (folder / "Makefile").exists():
            make()
        elif found is None:
            raise refuse(
                str(folder),
                "neither a helpers_cpp compiled for this Python nor a Makefile",
                "one of them",
                "Install a megatron-core wheel for this version of Python, or use a source checkout.",
            )

    return compile_helpers
