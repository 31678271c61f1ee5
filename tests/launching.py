"""Real training runs for tests: torchrun over loopback, tiny models, observed losses and parameter digests."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_ciera import observe
from tests import warm

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "scripts" / "pretrain_gpt.py")

TINY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
    "--seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --tokenizer-type NullTokenizer --vocab-size 255 --mock-data --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 6 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 20 "
    "--weight-decay 0.1 --clip-grad 1.0 --bf16 --use-distributed-optimizer --log-interval 1 --eval-iters 0 "
    "--eval-interval 1000 --save-interval 1000 --num-workers 0 --attention-dropout 0 --hidden-dropout 0"
).split()


def shared_gpu() -> dict[str, str]:
    """Variables for `launch` under which the ranks share one GPU, if there is only one."""
    import torch

    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if torch.cuda.device_count() < 2:
        path.insert(0, str(ROOT / "tests" / "shared_gpu"))
    return {"PYTHONPATH": os.pathsep.join(path)}


@dataclass(frozen=True)
class Run:
    """One finished run: exit code, everything printed, and the folder of what was observed."""

    returncode: int
    output: str
    observed: Path

    @property
    def iterations(self) -> list[dict]:
        return observe.read_iterations(self.observed)

    @property
    def parameters(self) -> dict[str, dict[str, str]]:
        return observe.read_parameters(self.observed)

    def check(self) -> "Run":
        assert self.returncode == 0, self.output[-6000:]
        return self

    @property
    def said(self) -> str:
        """What the training processes printed, without torchrun's report of a failed one, which says it again."""
        return self.output.split("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")[0]

    @property
    def tracebacks(self) -> int:
        """Python tracebacks of the training processes; torchrun's own is left out."""
        own_report = "torchrun" in self.said or "torch/distributed/run.py" in self.said
        return self.said.count("Traceback (most recent call last)") - int(own_report)


def without(flags: list[str], *names: str) -> list[str]:
    """TINY-style flags without the named ones (and their values)."""
    kept, skip = [], False
    for word in flags:
        if word.startswith("--"):
            skip = word in names
        if not skip:
            kept.append(word)
    return kept


def launch(
    folder: Path, processes: int, flags: list[str], *, script=(SCRIPT,), timeout=240, **environment
) -> Run:
    """Runs `script` with `flags` on `processes` processes; never raises for a failed run."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [*warm.torchrun(processes), *script, *map(str, flags)]
    variables = {
        **os.environ,
        observe.VARIABLE: str(folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **environment,
    }
    process = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
        cwd=folder,
        timeout=timeout,
        text=True,
    )
    (folder / "output.log").write_text(process.stdout)
    return Run(process.returncode, process.stdout, folder)
