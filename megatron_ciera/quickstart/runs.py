"""The training runs of the quickstart, each a torchrun of scripts/pretrain_gpt.py."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ciera.observe import VARIABLE
from megatron_ciera.quickstart.corpus import VOCABULARY

PROCESSES = 4
EXPERT_PARALLEL = 2
NUM_EXPERTS = 16
TOPK = 2
NUM_LAYERS = 4
SEQUENCE = 256
GLOBAL_BATCH = 8

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Plan:
    """How long the runs are, in iterations, and where everything goes."""

    folder: Path
    train_iterations: int
    resume_iterations: int

    @property
    def last_iteration(self) -> int:
        return self.train_iterations + self.resume_iterations

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def trace(self) -> Path:
        return self.folder / "routing_trace"

    @property
    def placement(self) -> Path:
        return self.folder / "placement.json"

    def observed(self, name: str) -> Path:
        return self.folder / "runs" / name


def model_flags(plan: Plan, dataset: Path) -> list[str]:
    """Flags that all runs share. 4 layers x width 128, 16 experts top-2, EP 2 x expert data parallel 2."""
    flags = {
        "num-layers": NUM_LAYERS,
        "hidden-size": 128,
        "ffn-hidden-size": 256,
        "num-attention-heads": 4,
        "num-experts": NUM_EXPERTS,
        "moe-router-topk": TOPK,
        "moe-ffn-hidden-size": 128,
        "moe-token-dispatcher-type": "alltoall",
        "moe-aux-loss-coeff": "1e-2",
        "expert-model-parallel-size": EXPERT_PARALLEL,
        "seq-length": SEQUENCE,
        "max-position-embeddings": SEQUENCE,
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": VOCABULARY,
        "data-path": dataset,
        "data-cache-path": plan.folder / "data_cache",
        "split": "100,0,0",
        "micro-batch-size": 2,
        "global-batch-size": GLOBAL_BATCH,
        "lr": "2e-3",
        "min-lr": "2e-4",
        "lr-decay-style": "cosine",
        "lr-warmup-iters": 10,
        # Fixed from the start: a resumed run with another --train-iters keeps the schedule.
        "lr-decay-iters": plan.last_iteration,
        "weight-decay": 0.1,
        "clip-grad": 1.0,
        "attention-dropout": 0,
        "hidden-dropout": 0,
        "log-interval": 1,
        "eval-iters": 0,
        "eval-interval": 100000,
        "save-interval": 100000,
        "num-workers": 0,
        "seed": 1234,
    }
    bare = ["swiglu", "disable-bias-linear", "bf16", "use-distributed-optimizer"]
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))] + [
        f"--{name}" for name in bare
    ]


def train(plan: Plan, name: str, flags: list[str], on_iteration: Callable[[int], None]) -> float:
    """Runs one training; calls `on_iteration(k)` as iterations end; returns seconds.

    Raises:
        RuntimeError: the run failed; its last lines are in the message, all of it in the log file.
    """
    observed = plan.observed(name)
    observed.mkdir(parents=True, exist_ok=True)
    log = observed / "log.txt"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)),
        *(str(ROOT / "scripts" / "pretrain_gpt.py"), *flags),
    ]
    (observed / "command.json").write_text(json.dumps(command, indent=1))
    environment = {
        **os.environ,
        VARIABLE: str(observed),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    begin = time.perf_counter()
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        )
        try:
            while process.poll() is None:
                on_iteration(_iterations_done(observed))
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    on_iteration(_iterations_done(observed))
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(
            f"the run '{name}' failed with exit code {process.returncode}; end of {log}:\n{tail}"
        )
    return time.perf_counter() - begin


def _iterations_done(observed: Path) -> int:
    try:
        return len((observed / "iterations.jsonl").read_bytes().splitlines())
    except OSError:
        return 0
