"""One rank's file of a Megatron routing trace: `router_trace_rank{r}.jsonl`, a line for each router call.

Megatron appends the records of a step when the step is over and starts the file anew with each run. So steps
rise, and only the last line can lack its end: that of a run killed while it wrote. Anything else is damage.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

AGAIN = "copy the trace again, or record again into an empty folder"
_NAME = re.compile(r"router_trace_rank(\d+)\.jsonl")
_STEP = re.compile(rb'\{"step": (\d+),')


@dataclass
class Step:
    """Records of one rank at one step: (block, mtp_idx, local layer) -> list of [tokens, topk] arrays.

    `is_cut`: the file ends inside a line of this step.
    """

    number: int
    records: dict = field(default_factory=dict)
    is_cut: bool = False

    @property
    def num_records(self) -> int:
        """Whole records, of all layers together."""
        return sum(map(len, self.records.values()))


def rank_of(path: Path) -> int | None:
    """The rank in the name of a file; None when it is no rank's file."""
    match = _NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def rank_files(path: Path) -> list[Path]:
    """The rank files of a folder, or the file itself."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if rank_of(file) is not None)


def steps(path: Path):
    """Yields Step after Step. Raises ValueError naming the line that is no record or goes back in steps."""
    rank, current = rank_of(path), None
    with open(path, "rb") as file:
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            number, key, top_indices = _parse(line, rank) or (None, None, None)
            is_cut = number is None and not line.endswith(b"\n")
            if is_cut:
                match = _STEP.match(line)
                number = int(match.group(1)) if match else current and current.number
            if number is None:
                if is_cut:
                    return
                raise ValueError(
                    f"trace {path}, line {line_number}: found {_shown(line)}, wanted a whole record of rank "
                    f"{rank}: step, block, layer and num_tokens x topk top_indices. The file is damaged, or of "
                    f"another rank: {AGAIN}"
                )
            if current is None or number != current.number:
                if current is not None:
                    yield current
                    if number < current.number:
                        raise ValueError(
                            f"trace {path}, line {line_number}: step {number} follows step {current.number}, "
                            f"wanted steps that rise. Several runs in one file? {AGAIN.capitalize()}"
                        )
                current = Step(number)
            if is_cut:
                current.is_cut = True
            else:
                current.records.setdefault(key, []).append(top_indices)
    if current is not None:
        yield current


def last_step(path: Path) -> int:
    """Step of the last whole record, read from the end of the file; -1 without one in the last two lines."""
    with open(path, "rb") as file:
        start = file.seek(0, 2)
        tail, size = b"", 1 << 16
        while start and tail.strip().count(b"\n") < 2:
            size, start = 2 * size, max(0, start - size)
            file.seek(start)
            tail = file.read()
    for line in reversed(tail.strip().split(b"\n")[-2:]):
        record = _parse(line, rank_of(path))
        if record is not None:
            return record[0]
    return -1


def _parse(line: bytes, rank: int):
    """(step, (block, mtp_idx, layer), [tokens, topk] int32), None for a line that is no record of the rank."""
    try:
        record = json.loads(line)
        top_indices = np.asarray(record["top_indices"], dtype=np.int32)
        if top_indices.shape != (record["num_tokens"], record["topk"]) or record.get("rank", rank) != rank:
            return None
        key = (record["block"], record.get("mtp_idx"), int(record["layer"]))
        return int(record["step"]), key, top_indices
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _shown(line: bytes) -> str:
    text = line.decode(errors="replace").strip()
    return repr(text if len(text) <= 80 else f"{text[:50]} ... {text[-20:]}")
