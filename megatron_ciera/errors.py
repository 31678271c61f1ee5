"""The one error that ends a run before its first collective, and how it is shown."""

import argparse
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

EXIT_CODE = 2
# Where torchrun looks for what ended a process. It prints it last, behind a traceback of its own.
_TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"

# Every rank finds a wrong flag, but torchrun kills the others as soon as one exits. The first rank of a
# node speaks at once; the others wait, so that a mistake common to all is printed once and one that only
# this rank sees (a missing library, say) is still printed.
_OTHER_RANKS_WAIT_S = 5.0


class ConfigurationError(ValueError):
    """A flag, file or environment that this run cannot work with."""


def refuse(flag: str, found: object, wanted: str, remedy: str) -> ConfigurationError:
    """The error for `flag`: value found, value wanted, way out. The caller raises it.

    Args:
        flag: flag, file or variable as the user wrote it.
        found: value found.
        wanted: what would work.
        remedy: one or two things that the user can do.
    """
    return ConfigurationError(f"{flag}: found {found}, needs {wanted}. {remedy}")


def check_folder(name: str, path: str | Path) -> None:
    """Raises ConfigurationError unless `path` is a folder that can be written, or can be made.

    Args:
        name: flag or variable that names it, as the user wrote it.
    """
    if (found := _no_folder(Path(path))) is not None:
        raise refuse(name, found, *_FOLDER)


def output_folder(text: str) -> Path:
    """argparse type: `check_folder` for the tools."""
    if (found := _no_folder(Path(text))) is not None:
        wanted, remedy = _FOLDER
        raise argparse.ArgumentTypeError(f"found {found}, needs {wanted}. {remedy}")
    return Path(text)


_FOLDER = "a folder, there or to be made", "Name another path."


def _no_folder(path: Path) -> str | None:
    """Why nothing can be written in `path`, or None if it is a folder for that, or can be made."""
    there = path.absolute()
    while not os.path.lexists(there):  # a link to nowhere is there: no folder can be made in its place
        there = there.parent
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    kind = "which cannot be written" if there.is_dir() else "which is a file"
    if there.is_symlink() and not there.exists():
        kind = "which is a link to nowhere"
    return f"{path}, {kind}" if there == path.absolute() else f"{path} below {there}, {kind}"


def exit_with(error: Exception) -> None:
    """Prints `error` as one message without a traceback, tells torchrun, and ends the process with code 2."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_OTHER_RANKS_WAIT_S)
    message = f"megatron-ciera: error (rank {rank}): {error}"
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if path := os.environ.get(_TORCHRUN_FILE):
        _write_whole(Path(path), {"message": message, "extraInfo": {"timestamp": int(time.time())}})
    # NOTE: os._exit, as interpreter teardown waits for data loaders and communicators of other threads.
    os._exit(EXIT_CODE)


def _write_whole(path: Path, message: dict) -> None:
    """By a rename: torchrun kills the other ranks at any moment, and fails over a file that is cut off."""
    part = path.with_suffix(".part")
    with suppress(OSError):
        part.write_text(json.dumps({"message": message}))
        part.replace(path)
