"""Stock Megatron for comparison: our training script without our launcher, observed from outside."""

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from megatron_ciera import compat, cpu, launch, observe  # noqa: E402


def observed(training) -> None:
    """Records losses and final parameters by the means of this file alone."""
    observer = observe.Observer(Path(os.environ[observe.VARIABLE]))
    log, train = training.training_log, training.train

    def training_log(losses, *args, **kwargs):
        result = log(losses, *args, **kwargs)
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            observer.iteration(args[2], losses, args[6], {})
        return result

    def train_and_digest(forward_step, model, *args, **kwargs):
        result = train(forward_step, model, *args, **kwargs)
        observer.parameters(model, int(os.environ["RANK"]))
        return result

    training.training_log, training.train = training_log, train_and_digest


def prepare() -> None:
    if cpu.is_needed():
        cpu.install()
    compat.install()
    if cpu.is_needed():
        cpu.install_megatron_patches()
        sys.argv[1:], _ = cpu.default_arguments(sys.argv[1:])
    from megatron.training import training

    observed(training)


launch.prepare = prepare
runpy.run_path(str(ROOT / "scripts" / "pretrain_gpt.py"), run_name="__main__")
