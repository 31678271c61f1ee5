"""Our training script, in which rank 1 is killed in the middle of writing a layer that it received."""

import os
import runpy
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from megatron_ciera.launch import prepare  # noqa: E402

prepare()

from megatron_ciera.moe import migration  # noqa: E402

write = migration._write


def killed_write(receive, incoming):
    if os.environ["RANK"] == "1":
        write(receive, incoming[: len(incoming) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(receive, incoming)


migration._write = killed_write
runpy.run_path(str(ROOT / "scripts" / "pretrain_gpt.py"), run_name="__main__")
