"""What the measuring scripts share: links that NCCL is made to take; training runs that are timed and observed."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

from megatron_ciera import observe
from megatron_ciera.transformer_engine import LOCAL_LAYERS

SCRIPTS = Path(__file__).resolve().parent
TRAIN = str(SCRIPTS / "pretrain_gpt.py")

# Environments under which NCCL takes another way between the GPUs of one host; GB/s as measured on 2 H200s.
LINKS = {
    "nvlink": {},
    "shm": {"NCCL_P2P_DISABLE": "1"},
    "socket": {
        **{"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"},
        **{"NCCL_SOCKET_IFNAME": "lo", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
    },
}
# Flags of models made here, without Transformer Engine.
LOCAL = [
    *LOCAL_LAYERS,
    *(
        "--attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope --normalization "
        "RMSNorm --swiglu --disable-bias-linear --tokenizer-type NullTokenizer --mock-data --num-workers 0 "
        "--eval-iters 0 --eval-interval 100000 --bf16 --use-distributed-optimizer --lr-decay-style cosine "
        "--weight-decay 0.1 --clip-grad 1.0 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
        "--log-interval 1"
    ).split(),
]


def launch(words: list[str], gpus: int, log: Path, environment: dict, timeout: float | None = None):
    """`words` on `gpus` processes of this host. Returns (exit code or "time limit", what they printed)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    environment = os.environ | {"NCCL_NVLS_ENABLE": "0", "PYTHONPATH": search_path()} | environment
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*command, *words], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            # torchrun ends its processes when it is asked to, not when it is killed.
            process.terminate()
            process.wait()
            code = "time limit"
    return code, log.read_text(errors="replace")


def result_of(printed: str) -> dict | None:
    """What megatron_ciera.param_gather.bench found, in all that its processes printed; None if it ended without."""
    for line in printed.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return None


def search_path() -> str:
    """PYTHONPATH with this clone in front."""
    return os.pathsep.join([str(SCRIPTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def train(folder: Path, gpus: int, flags: list[str], environment: dict, timeout: float) -> dict:
    """One training run, observed in `folder`; its printed text is in `folder.log`.

    Returns exit code, wall seconds, seconds of each iteration, Megatron's timers, and where there are any the last
    iteration's losses and metrics and the peak memory in bytes.
    """
    begin = time.time()
    observe.clear(folder)
    environment = {"OMP_NUM_THREADS": "4"} | environment | {observe.VARIABLE: str(folder)}
    code, text = launch([TRAIN, *flags], gpus, folder.with_suffix(".log"), environment, timeout)
    found = {
        "exit": code,
        "wall": time.time() - begin,
        "seconds": iteration_seconds(text),
        "timers": timers(text),
        "peak_bytes": observe.read_peak_memory(folder),
    }
    if (folder / "iterations.jsonl").exists():
        last = observe.read_iterations(folder)[-1]
        found["metrics"], found["losses"] = last["metrics"], last["losses"]
    return found


def iteration_seconds(text: str) -> list[float]:
    """Seconds of each iteration in what Megatron printed."""
    return [float(found) / 1e3 for found in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)]


def timers(text: str) -> dict[str, float]:
    """Median milliseconds of Megatron's timers, the slowest rank's, over the second half of the run."""
    found: dict[str, list[float]] = {}
    for name, worst in re.findall(r"^\s+([a-z-]+) \.+: \([\d.]+, ([\d.]+)\)", text, re.M):
        found.setdefault(name, []).append(float(worst))
    return {name: statistics.median(values[len(values) // 2 :]) for name, values in found.items()}


def slug(text: str) -> str:
    """`text` as a file's name."""
    return "_".join("".join(c if c.isalnum() else " " for c in text).split())
