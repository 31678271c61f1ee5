"""A fit in a Python process of its own, started and waited for by a training process.

A process and not a thread: the search holds Python's lock, and training must go on. Imports no Megatron.
"""

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


class FitFailedError(RuntimeError):
    """The process of a fit ended with an error; the message has its code and last line."""


def start(module: str, **arrays) -> subprocess.Popen:
    """Runs `python -m module` with `arrays` on its standard input, for `read_arrays`, and returns at once."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Through a file: a pipe would block training until the child has imported what reads it.
    with tempfile.TemporaryFile() as packed:
        np.savez(packed, **arrays)
        packed.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=packed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )


def output_of(process: subprocess.Popen) -> bytes:
    """Waits for a started process: what it wrote to standard output.

    Raises:
        FitFailedError: it ended with an error.
    """
    output, complaint = process.communicate()
    if process.returncode != 0:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise FitFailedError(f"the fit ended with code {process.returncode}: {last[0]}")
    return output


def read_arrays():
    """In the started process: the arrays that it was given, an open `NpzFile`."""
    return np.load(io.BytesIO(sys.stdin.buffer.read()))
