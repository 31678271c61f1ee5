"""Launching: `python -m megatron_ciera SCRIPT …`, and `prepare()` for a script of one's own.

Order matters and is the whole content of this file: the layer for machines without a GPU goes in before
Megatron is imported, our seams go in before the user's script imports names from Megatron.
"""

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ciera import yaml_config
from megatron_ciera.errors import ConfigurationError, exit_with, refuse
from megatron_ciera.feature import Feature

_USAGE = """usage: torchrun … -m megatron_ciera path/to/pretrain_gpt.py [--config configs/X.yaml] <Megatron flags> \
[--ciera] [--correlated-placement] …
Runs an unmodified Megatron training script with megatron-ciera's flags. See README.md."""


def main(argv: list[str] | None = None) -> None:
    """Attaches to Megatron, then runs the script named first on the command line as `__main__`."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ("-h", "--help"):
        print(_USAGE)
        sys.exit()
    try:
        if not argv:
            raise ConfigurationError(f"python -m megatron_ciera: found no training script.\n{_USAGE}")
        script = Path(argv[0])
        if not script.is_file():
            raise ConfigurationError(
                f"python -m megatron_ciera {script}: no such file. Name the training script first, then its flags."
            )
        # As for `python script.py`: a checkout's own `megatron/` beside the script comes before an installed one.
        sys.path[0] = str(script.resolve().parent)
        sys.argv = [str(script), *argv[1:]]
        _prepare((), _cpu_defaults_of_others)
        runpy.run_path(str(script), run_name="__main__")
    except ConfigurationError as error:
        exit_with(error)


def prepare(in_front: Sequence[Feature] = ()) -> None:
    """Makes this process ready to run a Megatron training script with our flags.

    Takes `--config` off `sys.argv`, installs the CPU layer where there is no GPU, checks Megatron's version and
    puts our seams in. Ends the process with a message if the environment or the command line cannot work. A script
    that prepares by itself may be imported afterwards.

    Args:
        in_front: features of the caller's own (feature.py), called at every point of the run before ours.
    """
    _prepare(in_front, _cpu_defaults)


def _prepare(in_front: Sequence[Feature], cpu_defaults: Callable[[list[str]], list[str]]) -> None:
    try:
        config_path, sys.argv[1:] = yaml_config.take_config_flag(sys.argv[1:])
        run_config = yaml_config.load_config(config_path) if config_path else None

        from megatron_ciera import cpu

        complete_argv = None
        if cpu.is_needed():
            cpu.install()
            complete_argv = cpu_defaults
        from megatron_ciera import compat, install

        install.install(run_config, complete_argv, in_front)
        compat.install()
        if complete_argv:
            cpu.install_megatron_patches()
    except ConfigurationError as error:
        exit_with(error)


def prepare_spawned() -> None:
    """For what multiprocessing starts from a training script, as Megatron does to save: the CPU layer alone.

    Those that use Megatron import it; the one that every rank has for its queue of written files does not.
    """
    from megatron_ciera import cpu

    if cpu.is_needed():
        cpu.install()


def _cpu_defaults(argv: list[str]) -> list[str]:
    from megatron_ciera import cpu

    argv, notes = cpu.default_arguments(argv)
    if os.environ.get("RANK", "0") == "0":
        added = f"; added {' '.join(notes)}" if notes else ""
        print(f"megatron-ciera: no GPU: training on CPU with gloo{added}", flush=True)
    return argv


def _cpu_defaults_of_others(argv: list[str]) -> list[str]:
    """For scripts that do not know this module: what they spawn has no CPU layer, ends, and is waited for."""
    flag = "--use-persistent-ckpt-worker"
    if flag in argv:
        raise refuse(
            flag,
            "it set, without a GPU",
            "it left out with a script that is run by -m megatron_ciera",
            "Leave it out (--async-save then saves in the foreground), or use scripts/pretrain_gpt.py.",
        )
    return _cpu_defaults(argv)
