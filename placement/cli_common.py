"""What command lines share: output files, trace arguments, progress on standard error, errors without traceback."""

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from placement.megatron_trace import short
from placement.trace import open_trace


def positive_int(text: str) -> int:
    """argparse type: an integer from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} found, wanted an integer from 1")
    return value


def natural_int(text: str) -> int:
    """argparse type: an integer from 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} found, wanted an integer from 0")
    return value


def output_file(text: str) -> str:
    """argparse type: a path that a file can be written at, asked before long work."""
    path, wanted = Path(text), "wanted the path of a file that can be written; name another"
    folder = path.absolute().parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: found a folder, {wanted}")
    try:
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror} ({folder}), {wanted}") from None
    return text


def plot_file(text: str) -> str:
    """argparse type: an `output_file` that is drawn, which needs matplotlib."""
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            f"{text}: matplotlib is missing; pip install 'megatron-ciera[plots]' (in a clone: '.[plots]'), or "
            "leave the flag out"
        )
    return output_file(text)


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """TRACE... and the options that say how to read it."""
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="folder of Megatron's router_trace_rank*.jsonl (of every rank; single files: of these ranks alone), or "
        "an .npz of [layers, tokens, topk]",
    )
    parser.add_argument("--array", metavar="NAME", help="array of the .npz (default: top_indices)")
    parser.add_argument(
        "--pipeline-model-parallel-size",
        type=positive_int,
        default=1,
        metavar="PP",
        help="pipeline stages of the traced run: stage = rank // (ranks / PP). A Megatron trace names no stages: a "
        "wrong size is refused where routing shows it, and noted where too few tokens were read (default: 1)",
    )
    parser.add_argument(
        "--virtual-pipeline-model-parallel-size",
        type=positive_int,
        default=1,
        metavar="VPP",
        help="virtual pipeline stages of the traced run; only 1 can be read from a Megatron trace",
    )
    parser.add_argument(
        "--layers-per-stage",
        type=positive_int,
        nargs="+",
        metavar="N",
        help="decoder layers of the pipeline stages, one number or one each (default: found from the trace)",
    )
    parser.add_argument(
        "--serving-shape",
        type=positive_int,
        nargs=2,
        metavar=("LAYERS", "TOPK"),
        help="MoE layers and experts per token, for SGLang's flat routed experts",
    )
    parser.add_argument(
        "--skip-tokens",
        type=natural_int,
        default=0,
        metavar="N",
        help="tokens to leave out in front (default: 0)",
    )


def open_trace_arguments(args):
    """The reader that the parsed arguments name."""
    if args.virtual_pipeline_model_parallel_size > 1:
        raise ValueError(
            f"--virtual-pipeline-model-parallel-size {args.virtual_pipeline_model_parallel_size}: "
            "Megatron's trace "
            "writes the layers of all virtual chunks of a rank under the same numbers, so they cannot be "
            "told "
            "apart; record the trace without virtual pipeline stages, or fit in the run "
            "(--correlated-placement "
            "without --placement-file)"
        )
    return open_trace(
        args.traces,
        array=args.array,
        pipeline_parallel_size=args.pipeline_model_parallel_size,
        layers_per_stage=args.layers_per_stage,
        serving_shape=tuple(args.serving_shape) if args.serving_shape else None,
    )


class Progress:
    """A tqdm bar on standard error, fed with totals; shown on a terminal only unless `always`."""

    def __init__(self, description: str, unit: str, total: int | None = None, always: bool = False):
        self.bar = tqdm(
            desc=description,
            unit=unit,
            total=total,
            file=sys.stderr,
            leave=False,
            unit_scale=unit == "token",
            disable=None if not always else False,
        )

    def __call__(self, done: int, total: int | None = None) -> None:
        if total:
            self.bar.total = total
        self.bar.update(done - self.bar.n)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self.bar.close()


def say(text: str) -> None:
    """One line on standard error, where --json leaves room for people."""
    print(text, file=sys.stderr)


def run(main, argv) -> int:
    """Runs main(argv); a ValueError or OSError becomes one line on standard error and exit status 2."""
    try:
        return main(argv)
    except (ValueError, OSError) as error:
        say(f"{_program()}: error: {error}")
        return 2
    except KeyboardInterrupt:
        say(f"{_program()}: stopped")
        return 130


def _program() -> str:
    """What was typed: the script in a clone, the command of an installed package."""
    return Path(sys.argv[0]).name


def of_ranks(ranks) -> str:
    """Which ranks a trace is of, for tables: those that it lacks at its end show nowhere else."""
    if not ranks:
        return ""
    whole = len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    names = f"{ranks[0]}-{ranks[-1]}" if whole else short(ranks)
    return f" of rank{'s' if len(ranks) > 1 else ''} {names}"


def percent(share: float | None) -> str:
    """A share as a percentage for tables."""
    return "-" if share is None else f"{100 * share:.1f}%"
