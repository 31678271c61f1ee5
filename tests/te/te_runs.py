"""Whole training runs with Transformer Engine's layers: what each is started with, and all of them side by side."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ciera.record.clock import on_gpu
from tests.launching import ROOT, SCRIPT, TINY, Run, launch, shared_gpu
from tests.moe.placed_runs import BY_EXPERT

PLAIN = str(ROOT / "tests" / "plain_megatron.py")
try:
    import transformer_engine  # noqa: F401

    IS_INSTALLED = True
except (ImportError, OSError):  # OSError: its libraries want a CUDA that is not here
    IS_INSTALLED = False
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not on_gpu(), reason="needs a GPU"),
    pytest.mark.skipif(
        not IS_INSTALLED, reason="needs Transformer Engine: scripts/install_transformer_engine.sh"
    ),
]

TE = (
    "--transformer-impl transformer_engine --moe-grouped-gemm --moe-permute-fusion --attention-backend unfused "
    "--no-gradient-accumulation-fusion --deterministic-mode --lr-decay-iters 60"
)
CODED = "--ciera --ciera-warmup-iters 4 --ciera-no-selection"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
EXPERTS = "--expert-model-parallel-size 2 --clip-grad 0"
SHUFFLED = (
    "--num-layers 5 --micro-batch-size 2 --moe-router-load-balancing-type seq_aux_loss --clip-grad 0 "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
    "--expert-tensor-parallel-size 1 --correlated-placement --placement-file {folder}/shuffled.json"
)
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router"

# What products and optimizer keep, and the flags that say so.
PRECISIONS = {
    "masters": "",
    "precise": "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    "fp8": "--fp8-format hybrid --fp8-recipe tensorwise",
}


@dataclass(frozen=True)
class Start:
    """How a run is started. `after`: the run whose checkpoints it reads."""

    flags: str
    iterations: int = 10
    after: str | None = None
    script: str = SCRIPT
    processes: int = 2
    connections: int = 1
    is_compiled: bool = False  # activations, by torch.compile: half a minute for each process


def _of_precision(name: str, flags: str) -> dict[str, Start]:
    def placed(map_: str, at: int, of: str, to: str) -> str:
        return (
            f"{flags} {EXPERTS} --correlated-placement --placement-file {{folder}}/{map_}.json "
            f"--load {{folder}}/{of} --ckpt-step {at} --save {{folder}}/{to} --save-interval 1"
        )

    saved, under_a = f"{name}_plain", f"{name}_under_a"
    weights_alone = "--no-load-optim" if name == "precise" else ""
    return {
        f"{name}, plain": Start(f"{flags} {EXPERTS} --save {{folder}}/{saved} --save-interval 1", 3),
        f"{name}, under a": Start(placed("a", 1, saved, under_a), 3, f"{name}, plain"),
        f"{name}, replicated": Start(flags),
        f"{name}, replicated, ciera": Start(f"{flags} {CODED}"),
        f"{name}, experts": Start(f"{flags} {EXPERTS}"),
        f"{name}, experts, all": Start(
            f"{flags} {EXPERTS} --dedup-dispatch {CODED} {OVERLAP} --ciera-verify-interval 5", connections=8
        ),
        f"{name}, under b": Start(
            placed("b", 2, under_a, f"{name}_under_b") + " --no-dedup-dispatch", 3, f"{name}, under a"
        ),
        f"{name}, resumed": Start(placed("a", 2, under_a, f"{name}_again"), 3, f"{name}, under a"),
        f"{name}, in plain": Start(
            f"{flags} {EXPERTS} --load {{folder}}/{under_a} --ckpt-step 2 --save {{folder}}/{name}_in_plain "
            f"{BY_EXPERT} {weights_alone}",
            3,
            f"{name}, under a",
            PLAIN,
        ),
    }


FIRST = "masters, experts, all"
STARTS: dict[str, Start] = {}
for _name, _flags in PRECISIONS.items():
    STARTS |= _of_precision(_name, _flags)
_DEDUP, _SELECTIVE = f"{EXPERTS} --dedup-dispatch", "--recompute-granularity selective --recompute-modules"
STARTS |= {
    "precise, replicated, overlap": Start(
        f"{PRECISIONS['precise']} {CODED} {OVERLAP} --ciera-verify-interval 5", connections=8
    ),
    "masters, replicated, overlap": Start(f"{CODED} {OVERLAP} --ciera-verify-interval 5", connections=8),
    "masters, alone": Start("", processes=1, is_compiled=True),
    "masters, alone, ciera": Start(CODED, processes=1, is_compiled=True),
    "fp8 parameters": Start("--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather"),
    "fp8 parameters, ciera": Start(f"--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather {CODED}"),
    "delayed, experts": Start(f"--fp8-format hybrid --fp8-recipe delayed {EXPERTS}"),
    "delayed, experts, all": Start(f"--fp8-format hybrid --fp8-recipe delayed {_DEDUP} {CODED}"),
    "graphs": Start(f"{GRAPHS} {EXPERTS}"),
    "graphs, all": Start(f"{GRAPHS} {_DEDUP} {CODED}"),
    "dedup, recomputed layers": Start(f"{_DEDUP} {_SELECTIVE} moe"),
    "dedup, recomputed activations": Start(f"{_DEDUP} {_SELECTIVE} moe_act layernorm"),
    "top 4": Start(f"{EXPERTS} --moe-router-topk 4"),
    "top 4, dedup": Start(f"{_DEDUP} --moe-router-topk 4"),
    "top 4, dedup again": Start(f"{_DEDUP} --moe-router-topk 4"),
    "in order": Start(SHUFFLED, 3),
    "shuffled": Start(f"{SHUFFLED} --token-shuffle --save {{folder}}/shuffled --save-interval 2", 3),
    "shuffled, recomputed": Start(
        f"{SHUFFLED} --token-shuffle --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
        3,
    ),
    "shuffled, resumed": Start(
        f"{SHUFFLED} --token-shuffle --load {{folder}}/shuffled --ckpt-step 2", 3, "shuffled"
    ),
    "shuffled, precise, ciera": Start(f"{SHUFFLED} --token-shuffle --ciera {PRECISIONS['precise']}", 3),
    "in order, precise": Start(f"{SHUFFLED} {PRECISIONS['precise']}", 3),
}


class Runs:
    """All runs of STARTS, a core for each process. `runs[name]` waits for one and checks its exit."""

    def __init__(self, folder: Path):
        self.folder = folder
        # Not left by a context manager: a failed test must not wait for every other run.
        self._pool = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2))
        self._futures: dict[str, Future] = {}
        for name in sorted(STARTS, key=_turn):
            self._futures[name] = self._pool.submit(self._start, name)
            if name == FIRST:
                self._futures[name].result()

    def __getitem__(self, name: str) -> Run:
        return self._futures[name].result().check()

    def _start(self, name: str) -> Run:
        start = STARTS[name]
        if start.after is not None and self._futures[start.after].result().returncode:
            return Run(1, f"not started: {start.after} failed", self.folder)
        words = [*TINY, *TE.split(), "--train-iters", str(start.iterations)]
        return launch(
            self.folder / f"run_{name.replace(', ', '_').replace(' ', '_')}",
            start.processes,
            [*words, *start.flags.format(folder=self.folder).split()],
            script=(start.script,),
            timeout=560,
            CUDA_DEVICE_MAX_CONNECTIONS=str(start.connections),
            TORCHDYNAMO_DISABLE=str(int(not start.is_compiled)),
            **shared_gpu(),
        )


def _turn(name: str) -> tuple:
    """First and alone the run that compiles and tunes kernels for all, then by how many runs wait one for another."""
    return name != FIRST, -_waiting(name)


def _waiting(name: str) -> int:
    return max((1 + _waiting(other) for other, start in STARTS.items() if start.after == name), default=0)
