"""The dataset helpers of the megatron-core wheel, which ships them compiled but without their Makefile.

`megatron.training` calls `compile_helpers` at every start. In a source checkout that runs `make`; in the
wheel there is nothing to make, and the run would exit although the compiled module is there.
"""

import importlib
from pathlib import Path

from megatron_ciera.errors import refuse
from megatron_ciera.seam import wrap


def install() -> None:
    """Make `megatron.core.datasets.utils.compile_helpers` accept the wheel's compiled helpers.

    Idempotent. Raises ConfigurationError if Megatron has no such function.
    """
    from megatron.core.datasets import utils

    wrap(utils, "compile_helpers", (), lambda make: _compile_or_find(make, Path(utils.__file__).parent))


def _compile_or_find(make, folder: Path):
    def compile_helpers() -> None:
        if (folder / "Makefile").exists():
            make()
            return
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError as error:
            raise refuse(
                str(folder),
                "neither a helpers_cpp compiled for this Python nor a Makefile",
                "one of them",
                "Install a megatron-core wheel for this version of Python, or use a source checkout.",
            ) from error

    return compile_helpers
