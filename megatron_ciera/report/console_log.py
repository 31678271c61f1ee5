"""What the console log of a training run says: Megatron's line of each iteration, our lines, rank 0's messages."""

import re
from dataclasses import dataclass, field

Series = dict[int, float]  # by iteration

_ITERATION = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|(.*)")
_METRICS = re.compile(r"\[megatron-ciera\] iteration\s+(\d+)( by layer)? \| (.*)")
_MESSAGE = re.compile(r"\bmegatron-ciera: (.*)")
_SELECTION = re.compile(r"selection, (.+):$")
_ROW = re.compile(r"\s+(\w+)\s+(\d+)\s+(\d+)\s+([\d.]+)%\s+([\d.]+)%\s+([\d.]+)\s+(-?[\d.]+)  (\S.*)$")
_GAIN = re.compile(r"\bgain (us|KB)\b")
# Megatron prints losses, and nothing else but learning rates, like this.
_LOSS = re.compile(r"-?\d\.\d{6}E[+-]\d+|NAN|INF")
_ENDS = ("[after training is done]", "exiting program at iteration", "exiting program after")


@dataclass(frozen=True)
class ClassRow:
    """One tensor class in a decision of selection; shares are fractions, `ratio` is expected / raw bytes."""

    kind: str
    segments: int
    compressed: int
    exponents_changed: float
    blocks_changed: float
    ratio: float
    gain: float
    codec: str


@dataclass
class PrintedDecision:
    """What selection decided for one group of buckets; `unit` of the gains: us or KB."""

    group: str
    after_iteration: int | None
    unit: str = "KB"
    rows: list[ClassRow] = field(default_factory=list)


@dataclass
class ConsoleLog:
    """One or several logs of one run, read in order; of an iteration that was repeated the last line counts."""

    planned: int | None = None
    finished: bool = False
    losses: dict[str, Series] = field(default_factory=dict)
    values: dict[str, Series] = field(default_factory=dict)
    metrics: dict[str, Series] = field(default_factory=dict)
    decisions: list[PrintedDecision] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Takes in a log. A last line without its end is left out: a number in it may be cut short."""
        last = None
        for line in text[: text.rfind("\n") + 1].splitlines():
            if found := _METRICS.search(line):
                self._read_metrics(int(found[1]), bool(found[2]), found[3])
            elif found := _ITERATION.search(line):
                last = int(found[1])
                self.planned = int(found[2])
                self._read_iteration(last, found[3])
            elif found := _MESSAGE.search(line):
                self._read_message(found[1].rstrip(), last)
            self.finished |= any(mark in line for mark in _ENDS)

    @property
    def iterations(self) -> list[int]:
        """Those that Megatron logged, ascending."""
        return sorted(set().union(*self.losses.values(), *self.values.values()))

    @property
    def reached_its_end(self) -> bool:
        """Whether training ended, by its own words or by the number of iterations."""
        logged = self.iterations
        interval = logged[-1] - logged[-2] if len(logged) > 1 else 1
        return self.finished or (bool(logged) and self.planned - logged[-1] < interval)

    def _read_iteration(self, iteration: int, fields: str) -> None:
        for part in fields.split("|")[:-1]:  # what follows the last bar is cut off, or another process's line
            name, _, value = (word.strip() for word in part.rpartition(":"))
            is_loss = _LOSS.fullmatch(value) and not name.endswith("learning rate")
            if name and (number := _number(value)) is not None:
                (self.losses if is_loss else self.values).setdefault(name, {})[iteration] = number

    def _read_metrics(self, iteration: int, by_layer: bool, fields: str) -> None:
        for part in fields.split(" | "):
            name, _, values = part.partition(": ")
            pairs = [pair.split(" ", 1) for pair in values.split(", ")] if by_layer else [["", values]]
            for layer, value in (pair for pair in pairs if len(pair) == 2):
                full = f"{name}/{f'layer_{layer}' if layer.isdigit() else layer}" if by_layer else name
                if (number := _number(value)) is not None:
                    self.metrics.setdefault(full, {})[iteration] = number

    def _read_message(self, message: str, last: int | None) -> None:
        if found := _SELECTION.match(message):
            self.decisions.append(PrintedDecision(found[1], last))
        elif found := _ROW.match(message):
            kind, segments, compressed, exponents, blocks, ratio, gain, codec = found.groups()
            shares = float(exponents) / 100, float(blocks) / 100
            row = ClassRow(kind, int(segments), int(compressed), *shares, float(ratio), float(gain), codec)
            if self.decisions:
                self.decisions[-1].rows.append(row)
        elif (found := _GAIN.search(message)) and message.lstrip().startswith("class"):
            if self.decisions:
                self.decisions[-1].unit = found[1]
        else:
            self.messages.append(message)


def is_from_megatron(text: str) -> bool:
    """Whether anything in a log is Megatron's or ours; one of several logs of a run may have no iterations."""
    return "megatron" in text or _ITERATION.search(text) is not None


def has_iterations(text: str) -> bool:
    """Whether a log has a whole line of Megatron's with an iteration; stops at the first."""
    return _ITERATION.search(text[: text.rfind("\n") + 1]) is not None


def _number(text: str) -> float | None:
    words = text.split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None
