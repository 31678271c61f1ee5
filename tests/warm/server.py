"""Runs Python programs in processes that have imported PyTorch already; started and described by warm/__init__.py.

python server.py SOCKET: listens there until its own standard input is closed.
"""

import fcntl
import gc
import importlib
import itertools
import json
import multiprocessing
import multiprocessing.process
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
import types
from contextlib import suppress

# What no program of ours changes before it imports it. Nothing of Megatron or of this project: those are under test.
MODULES = (
    *("torch", "torch.distributed", "torch.distributed.run", "sympy", "triton", "tensorboard.compat"),
    *("scipy.special", "scipy.linalg", "scipy.sparse", "yaml", "psutil", "einops"),
)
_MOST = 200  # descriptors of a program


def serve(path: str) -> dict:
    """Answers until standard input is closed, then exits. In each program's own process it returns the request."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(16)
    os.rename(path + ".new", path)
    events = selectors.DefaultSelector()
    events.register(sys.stdin, selectors.EVENT_READ, None)
    events.register(listener, selectors.EVENT_READ, None)
    running: dict[int, int] = {}  # file descriptor of the client -> process
    while True:
        for key, _ in events.select():
            if key.fileobj is sys.stdin:
                for process in running.values():
                    _signal(process, signal.SIGKILL)
                os._exit(0)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                request, descriptors = _receive(client)
                process = os.fork()
                if process == 0:
                    os.setsid()
                    for file in (client, *(key.fileobj for key in list(events.get_map().values()))):
                        if isinstance(file, socket.socket):
                            file.detach()
                    events.close()
                    _inherit(descriptors, request["descriptors"])
                    return request
                for descriptor in descriptors:
                    os.close(descriptor)
                running[client.fileno()] = process
                events.register(client, selectors.EVENT_READ, process)
                events.register(os.pidfd_open(process), selectors.EVENT_READ, client)
            elif isinstance(key.data, socket.socket):  # a program has ended
                client = key.data
                _, status = os.waitpid(running.pop(client.fileno()), 0)
                with suppress(OSError):
                    client.sendall(struct.pack("!i", status))
                for file in (key.fd, client):
                    with suppress(KeyError):
                        events.unregister(file)
                os.close(key.fd)
                client.close()
            else:  # signals for a program, or its client is gone
                numbers = key.fileobj.recv(16)
                for number in numbers or [signal.SIGKILL]:
                    _signal(key.data, number)
                if not numbers:
                    events.unregister(key.fileobj)


def _inherit(descriptors: list[int], wanted: list[int]) -> None:
    """Gives the descriptors the numbers that they have in the client, and closes all others."""
    high = [fcntl.fcntl(own, fcntl.F_DUPFD, _MOST) for own in descriptors]
    os.closerange(3, _MOST)
    for own, number in zip(high, wanted, strict=True):
        os.dup2(own, number)
        os.close(own)


def _receive(client: socket.socket) -> tuple[dict, list[int]]:
    header, descriptors, _, _ = socket.recv_fds(client, 4, _MOST)
    (length,) = struct.unpack("!I", header)
    text = b""
    while len(text) < length:
        text += client.recv(length - len(text))
    return json.loads(text), descriptors


def _signal(process: int, number: int) -> None:
    """To the process and what it started: torchrun's workers are sessions of their own."""
    for send in (os.killpg, os.kill):  # it may not lead its session yet
        with suppress(ProcessLookupError):
            return send(process, number)


def run(request: dict, search_path: list[str]) -> None:
    """As `python -u WORDS` in the client's folder and environment. What it spawns comes from this server too."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(None)
    multiprocessing.process.ORIGINAL_DIR = request["folder"]
    multiprocessing.set_executable(request["executable"])
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    first, *rest = itertools.dropwhile(("-B", "-u").__contains__, request["words"])
    places = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if first == "-m":
        sys.path[:] = [request["folder"], *places, *search_path]
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[:] = ["", *places, *search_path]
        sys.argv[:] = ["-c", *rest[1:]]
        _run(rest[0], "<string>")
    else:
        sys.path[:] = [os.path.dirname(os.path.abspath(first)), *places, *search_path]
        sys.argv[:] = [first, *rest]
        with open(first, "rb") as file:
            _run(file.read(), os.path.abspath(first), __file__=os.path.abspath(first))


def _run(source: str | bytes, name: str, **attributes: str) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(attributes)
    exec(compile(source, name, "exec"), vars(main))


if __name__ == "__main__":
    search_path = sys.path[1:]
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    run(serve(sys.argv[1]), search_path)
