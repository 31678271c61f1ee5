"""Our training script, in which memory is written down and faults happen where SOAK_FAULTS says.

SOAK_FAULTS: comma-separated kind:iteration.
    kill    rank 1 kills itself before that iteration
    fit     the process of the next fit is killed
    payload rank 1 finds one flipped bit in the next payload that it decodes
SOAK_MEMORY: folder for rank<R>.jsonl, [iteration, resident bytes] every ten iterations.
"""

import json
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from megatron_ciera import background  # noqa: E402
from megatron_ciera.feature import Feature  # noqa: E402
from megatron_ciera.launch import prepare  # noqa: E402

RANK = int(os.environ.get("RANK", "0"))
PAGE = os.sysconf("SC_PAGE_SIZE")


class Faults(Feature):
    """Makes faults due, and samples memory."""

    name = "soak"

    def __init__(self):
        pairs = [fault.split(":") for fault in os.environ.get("SOAK_FAULTS", "").split(",") if fault]
        self.due = {kind: int(iteration) for kind, iteration in pairs}
        self.iteration = 0
        self.memory = Path(os.environ["SOAK_MEMORY"]) / f"rank{RANK}.jsonl"

    def before_step(self, iteration: int) -> None:
        self.iteration = iteration
        if RANK == 1 and self.take("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if iteration % 10 == 0:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
            with open(self.memory, "a") as file:
                file.write(json.dumps([iteration, resident]) + "\n")

    def take(self, kind: str) -> bool:
        """True once, when the fault is due."""
        if self.iteration < self.due.get(kind, sys.maxsize):
            return False
        del self.due[kind]
        print(f"soak: {kind} at iteration {self.iteration}", flush=True)
        return True


faults = Faults()
prepare(in_front=[faults])

from megatron_ciera.param_gather.codec.cpu_codec import CpuCodec  # noqa: E402

start, decode = background.start, CpuCodec._decode_one


def start_or_kill(module, **arrays):
    process = start(module, **arrays)
    if faults.take("fit"):
        process.kill()
    return process


def decode_or_damage(self, payload, target, flag):
    if RANK == 1 and len(payload) > 200 and faults.take("payload"):
        payload = payload.copy()
        payload[len(payload) * 3 // 4] ^= 4
    decode(self, payload, target, flag)


background.start = start_or_kill
CpuCodec._decode_one = decode_or_damage

# Guarded: processes that a checkpoint spawns import this file.
if __name__ == "__main__":
    import pretrain_gpt

    pretrain_gpt.main()
