"""A finished run as its files tell it: console log, TensorBoard events, and what MEGATRON_CIERA_OBSERVE wrote."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from megatron_ciera import metrics, observe
from megatron_ciera.errors import ConfigurationError
from megatron_ciera.report.console_log import (
    ConsoleLog,
    PrintedDecision,
    Series,
    has_iterations,
    is_from_megatron,
)

# Sources of losses, the most exact first, and what equality means in each.
EQUALITY = {"observed": "in every bit", "tensorboard": "in every bit", "console": "in every printed digit"}

_LOGS = ("*.log", "*.txt", "*.out")
_EVENTS = "*events.out.tfevents.*"
_TIME = "elapsed time per iteration (ms)"
_OBSERVED = "iterations.jsonl"


@dataclass
class RunLog:
    """One run. Series are by iteration; of several sources the most exact one counts.

    losses: by source (a key of EQUALITY), then by name. seconds: of a step. metrics: ours, without the prefix.
    tail: counts after the last logged iteration. observed: the folder with parameter digests, if there is one.
    """

    files: list[Path] = field(default_factory=list)
    losses: dict[str, dict[str, Series]] = field(default_factory=dict)
    grad_norm: dict[str, Series] = field(default_factory=dict)
    seconds: Series = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    tail: dict[str, float] = field(default_factory=dict)
    decisions: list[PrintedDecision] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    observed: Path | None = None

    @property
    def name(self) -> str:
        """The files, as short as they can be told apart."""
        return ", ".join(str(path) for path in self.files)

    @property
    def iterations(self) -> list[int]:
        """Those with a loss, ascending."""
        return sorted({i for source in self.losses.values() for series in source.values() for i in series})

    @property
    def on_cpu(self) -> bool | None:
        """Whether the console log says so; None without a line of ours."""
        return any("no GPU" in message for message in self.messages) if self.messages else None

    def of(self, metric: str) -> Series:
        """One metric; empty if it was not reported."""
        return self.metrics.get(metric, {})

    def total(self, metric: str) -> float:
        """A count summed over the run."""
        return sum(self.of(metric).values()) + self.tail.get(metric, 0)

    def layers(self, metric: str) -> dict[str, Series]:
        """A metric's values of single layers, by layer name, in the order of the model."""
        start = f"{metric}/"
        found = {name.removeprefix(start): s for name, s in self.metrics.items() if name.startswith(start)}
        return dict(sorted(found.items(), key=lambda item: _layer_order(item[0])))


def read_run(paths: Sequence[Path], unfinished: bool = False) -> RunLog:
    """The run of `paths`, files or folders.

    Args:
        unfinished: take a console log that ends before its last iteration.

    Raises:
        ConfigurationError: a file is missing, empty, not of such a run, or ends early.
    """
    run, console, logs, texts, found = RunLog(), ConsoleLog(), [], [], []
    for path in paths:
        if not path.exists():
            raise ConfigurationError(f"{path}: no such file or folder. Give a run's console log")
        found += _files_of(path) if path.is_dir() else [path]
    # Observed numbers last: events hold them as float32.
    for file in sorted(found, key=lambda file: file.name == _OBSERVED):
        run.files.append(file)
        if file.name == _OBSERVED:
            _read_observed(run, file)
        elif "events.out.tfevents." in file.name:
            _read_events(run, file)
        else:
            text = _text(file)
            if text not in texts:  # the same output kept twice is one log
                texts.append(text)
                console.read(text)
            logs.append(file)
    _check_ends(console, logs, unfinished)
    _take_console(run, console)
    if not run.iterations:
        raise ConfigurationError(
            f"{run.name}: no loss found. Add the run's console log, with Megatron's ' iteration N/M | … | lm loss: …'"
        )
    return run


def _files_of(folder: Path) -> list[Path]:
    """What a folder has of a run: observations, logs of Megatron at its top, and events at any depth.

    Events that cannot be read for want of tensorboard are left out, if there is anything else.
    """
    files = sorted(folder.glob(_OBSERVED))
    for path in sorted(path for pattern in _LOGS for path in folder.glob(pattern)):
        files += [path] if has_iterations(path.read_text(errors="replace")) else []
    if not files or find_spec("tensorboard") is not None:
        files += sorted(folder.rglob(_EVENTS))
    if not files:
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{_OBSERVED}"))
        named = f"the folder of one run ({', '.join(inside)})" if inside else "the console log itself"
        raise ConfigurationError(
            f"{folder}: found no log of a run in this folder, needs TensorBoard events, iterations.jsonl, or a "
            f"console log ({', '.join(_LOGS)}) with Megatron's lines. Name {named}"
        )
    return files


def _text(path: Path) -> str:
    content = path.read_bytes()
    if not content.strip():
        raise ConfigurationError(f"{path}: the file is empty, needs a run's console log")
    if b"\0" in content[:65536]:
        raise ConfigurationError(
            f"{path}: found a binary file, needs a run's console log, or a file of TensorBoard events under its own "
            "name (events.out.tfevents.…)"
        )
    text = content.decode(errors="replace").replace("\r", "\n")
    if not is_from_megatron(text):
        raise ConfigurationError(
            f"{path}: found no line of Megatron's, needs the console log of a training run, with lines such as "
            "' iteration 10/ 100 | … | lm loss: 2.5E+00 | …'"
        )
    return text


def _check_ends(console: ConsoleLog, logs: list[Path], unfinished: bool) -> None:
    if not logs:
        return
    names = ", ".join(map(str, logs))
    if not console.iterations:
        raise ConfigurationError(
            f"{names}: found no logged iteration (' iteration 10/ 100 | …'). The run stopped before its first, "
            "--log-interval is longer than the run, the lines are in the log of the last rank (give that one too), "
            "or this is not the console log of a training run"
        )
    if not unfinished and not console.reached_its_end:
        raise ConfigurationError(
            f"{names}: ends after iteration {console.iterations[-1]} of {console.planned}: the log is cut off, or "
            "the run was. --unfinished reports what is there"
        )


def _take_console(run: RunLog, console: ConsoleLog) -> None:
    if console.losses:
        run.losses["console"] = console.losses
    if "grad norm" in console.values:
        run.grad_norm["console"] = console.values["grad norm"]
    if _TIME in console.values:
        run.seconds = {i: value / 1e3 for i, value in console.values[_TIME].items()}
    run.metrics = console.metrics | run.metrics
    run.decisions, run.messages = console.decisions, console.messages


def _read_observed(run: RunLog, path: Path) -> None:
    try:
        records = observe.read_iterations(path.parent)
        losses, norms = run.losses.setdefault("observed", {}), run.grad_norm.setdefault("observed", {})
        for record in records:
            iteration = record["iteration"]
            for name, value in record["losses"].items():
                losses.setdefault(name, {})[iteration] = value
            if record["grad_norm"] is not None:
                norms[iteration] = record["grad_norm"]
            for name, value in record["metrics"].items():
                run.metrics.setdefault(name, {})[iteration] = value
            run.tail = record.get("tail", {})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path}: line {_first_bad_line(path)} is not what MEGATRON_CIERA_OBSERVE writes ({error!r}): the file "
            "is damaged or cut off. Leave it out, or run again"
        ) from error
    if not records:
        raise ConfigurationError(f"{path}: the file is empty, needs what MEGATRON_CIERA_OBSERVE writes")
    run.observed = path.parent


def _first_bad_line(path: Path) -> int:
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            if not {"iteration", "losses", "grad_norm", "metrics"} <= json.loads(line).keys():
                return number
        except (ValueError, AttributeError):
            return number
    return 1


def _read_events(run: RunLog, path: Path) -> None:
    """Scalars of a TensorBoard file; of a step that was written twice the later one counts."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ConfigurationError(
            f"{path}: reading TensorBoard events needs tensorboard. pip install 'megatron-ciera[tensorboard]', or "
            "give the console log alone"
        ) from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    scalars = {
        tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]
    }
    if not scalars:
        raise ConfigurationError(
            f"{path}: no scalar found, needs the events that Megatron's last rank writes"
        )
    losses = run.losses.setdefault("tensorboard", {})
    for tag, series in scalars.items():
        if tag.startswith(metrics.PREFIX):
            target = run.metrics.setdefault(tag.removeprefix(metrics.PREFIX), {})
        elif tag == "iteration-time":
            target = run.seconds
        elif tag == "grad-norm":
            target = run.grad_norm.setdefault("tensorboard", {})
        elif (
            "loss" in tag
            and "-" not in tag
            and "/" not in tag
            and " vs " not in tag
            and "validation" not in tag
        ):
            target = losses.setdefault(tag, {})
        else:
            continue
        for step, value in series.items():
            target[step] = value
    if not losses:
        del run.losses["tensorboard"]


def _layer_order(name: str) -> tuple:
    block, *numbers = name.split("_")
    return block != "layer", *map(int, numbers)
