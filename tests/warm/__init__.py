"""Python programs that start with PyTorch imported: most of what a short training run takes are its ranks' imports.

A server for each local rank imports PyTorch and others' packages once and forks for every program (server.py); a
client takes the place of `python -u` on command lines and hands over environment, folder, descriptors and signals
(client.py). Megatron and this project are imported by each program itself, in its own order. Ranks keep hash seeds of
their own, so that sets of strings differ in order between them as they would.

Without a GPU only. MEGATRON_CIERA_TEST_COLD=1 starts everything as usual.
"""

import atexit
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from megatron_ciera import cpu

COLD = "MEGATRON_CIERA_TEST_COLD"
_HERE = Path(__file__).parent
_folder: Path | None = None
_servers: list[subprocess.Popen] = []


def python(processes: int = 1) -> list[str]:
    """The beginning of a command line in place of `python -u`, in up to `processes` local ranks at a time."""
    global _folder
    if os.environ.get(COLD, "0") != "0" or not cpu.is_needed():
        return [sys.executable, "-u"]
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="warm"))
        _write(_folder / "python", _client())
        atexit.register(_stop)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LOCAL_RANK")
    }
    for rank in range(len(_servers), processes):
        command = [sys.executable, "-u", _HERE / "server.py", _folder / str(rank)]
        _servers.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, env=environment | {"OMP_NUM_THREADS": "1"})
        )
    for rank in range(processes):
        while not (_folder / str(rank)).exists():
            assert _servers[rank].poll() is None, f"the server of rank {rank} has ended"
            time.sleep(0.02)
    return _client()


def torchrun(processes: int) -> list[str]:
    """The beginning of a torchrun command line on this host; a script, or -m and a module, and its flags follow."""
    start = python(processes)
    options = ["--standalone", "--nproc-per-node", str(processes)]
    if start[1] == "-u":
        return [*start, "-m", "torch.distributed.run", *options]
    return [*start, "-m", "torch.distributed.run", *options, "--no-python", *start]


def commands(folder: Path, processes: int) -> None:
    """Puts `python` and `torchrun --standalone --nproc-per-node N` into `folder`, for a shell session."""
    start = python(processes)
    if start[1] != "-u":
        _write(folder / "python", start)
        _write(folder / "torchrun", torchrun(processes), given=3)


def _client() -> list[str]:
    return [sys.executable, "-I", "-S", str(_HERE / "client.py"), str(_folder)]


def _write(file: Path, words: list[str], given: int = 0) -> None:
    """A shell script that puts `words` in the place of its own name and its first `given` arguments."""
    file.write_text(f'#!/bin/sh\nshift {given}\nexec {shlex.join(words)} "$@"\n')
    file.chmod(0o755)


def _stop() -> None:
    for server in _servers:
        server.stdin.close()
    for server in _servers:
        server.wait()
    for file in _folder.iterdir():
        file.unlink()
    _folder.rmdir()
