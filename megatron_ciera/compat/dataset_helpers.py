"""The dataset helpers of the megatron-core wheel, which ships them compiled but without their Makefile.

`megatron.training` calls `compile_helpers` at every start. In a source checkout that runs `make`; in the
wheel there is nothing to make, and the run would exit although the compiled module is there.
"""

import importlib
from pathlib import Path

from megatron_ciera.compat.patching import check_signature, is_replaced, original, replace


def install() -> None:
    """Make `megatron.core.datasets.utils.compile_helpers` accept the wheel's compiled helpers."""
    from megatron.core.datasets import utils

    if is_replaced(utils, "compile_helpers"):
        return
    check_signature(utils, "compile_helpers", ())
    replace(utils, "compile_helpers", _compile_helpers)


def _compile_helpers() -> None:
    from megatron.core.datasets import utils

    folder = Path(utils.__file__).parent
    if (folder / "Makefile").exists():
        original(utils, "compile_helpers")()
        return
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError as error:
        raise RuntimeError(
            f"{folder} has neither a compiled helpers_cpp for this Python nor a Makefile to build it; "
            "install a megatron-core wheel for this Python version, or use a source checkout"
        ) from error
