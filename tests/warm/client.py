"""python -I -S client.py FOLDER WORDS…: as `python WORDS`, in a process of this rank's server. See __init__.py."""

import json
import os
import signal
import socket
import struct
import sys


def main(folder: str, *words: str) -> None:
    inherited = [number for number in map(int, os.listdir("/proc/self/fd")) if _is_open(number)]
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.path.join(folder, os.environ.get("LOCAL_RANK", "0")))
    request = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": inherited,
        "executable": os.path.join(folder, "python"),
    }
    text = json.dumps(request).encode()
    socket.send_fds(server, [struct.pack("!I", len(text))], inherited)
    server.sendall(text)
    for number in inherited:
        if number > 2:
            os.close(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    status = server.recv(4)
    if not status:
        sys.exit(f"{folder}: the server of this rank has ended")
    code = os.waitstatus_to_exitcode(struct.unpack("!i", status)[0])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _is_open(number: int) -> bool:
    """False for the descriptor that listed them."""
    return os.path.exists(f"/proc/self/fd/{number}")


if __name__ == "__main__":
    main(*sys.argv[1:])
