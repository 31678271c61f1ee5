"""Reads Megatron's routing traces (`--moe-routing-trace-path`): `router_trace_rank{r}.jsonl`, one per rank.

What the format leaves open and how it is resolved here:
- A line is one router call of one rank: {"step", "block", "layer", "num_tokens", "topk", "top_indices"}.
  Several micro-batches of a step give several lines of the same layer, numbered by their order in the file.
- With recomputation the router is called again and writes the same routing again: repeated records of a
  step are dropped, for all layers in the same way.
- `layer` counts from 0 inside the pipeline stage and the stage is not named. Megatron's default rank order
  (tp-cp-ep-dp-pp) makes ranks of one stage consecutive: stage = rank // (world / PP). The ranks of one
  column, rank % (world / PP), see the same tokens at different layers.
- Layers of virtual pipeline chunks collide under one number and cannot be told apart.
Tokens are taken in the order (step, record, rank).
"""

import json
import re
import resource
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from placement.file import DECODER, MTP, LayerId
from placement.stage_check import stages_of

_NAME = re.compile(r"router_trace_rank(\d+)\.jsonl")
_DAMAGED_SHARE = 0.05


def is_megatron_trace(path: Path) -> bool:
    """True for a router_trace_rank*.jsonl file or a folder that holds some."""
    return bool(rank_files(path)) if path.is_dir() else bool(_NAME.fullmatch(path.name))


def rank_files(path: Path) -> list[Path]:
    """The rank files of a folder, or the file itself."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.iterdir() if _NAME.fullmatch(file.name))


@dataclass
class _Step:
    """Records of one rank at one step: (block, mtp_idx, local layer) -> list of [tokens, topk] arrays."""

    number: int
    records: dict = field(default_factory=dict)
    damaged: bool = False


class MegatronTrace:
    """Streams the rank files of one run, one step at a time."""

    source_layers = None

    def __init__(self, files, pipeline_parallel_size: int = 1, layers_per_stage: list[int] | None = None):
        self.files = {}
        for file in files:
            rank = int(_NAME.fullmatch(Path(file).name).group(1))
            if rank in self.files:
                raise ValueError(
                    f"trace {file}: rank {rank} is given twice (also {self.files[rank]}); give one run at "
                    "a time"
                )
            self.files[rank] = Path(file)
        self.source = str(next(iter(self.files.values())).parent)
        self.stages = pipeline_parallel_size
        self.columns = self._columns()
        self.layers_per_stage = layers_per_stage
        self.num_lines = self.num_damaged = self.num_dropped = self.num_repeated = 0
        self.iteration = None
        self.layer_ids = self._scan_layers()

    def _columns(self) -> list[list[int]]:
        """Ranks that see the same tokens, by stage: [columns][stages]."""
        ranks = sorted(self.files)
        if self.stages == 1:
            return [[rank] for rank in ranks]
        world = ranks[-1] + 1
        if ranks != list(range(world)) or world % self.stages:
            raise ValueError(
                f"trace {self.source}: rank files {_short(ranks)} with --pipeline-model-parallel-size "
                f"{self.stages}: wanted every rank from 0 and a number of ranks divisible by {self.stages}, "
                "because a rank's stage is rank // (ranks / stages); give all files of the run"
            )
        width = world // self.stages
        return [[stage * width + column for stage in range(self.stages)] for column in range(width)]

    def _scan_layers(self) -> tuple[LayerId, ...]:
        """Finds the layers of each stage in the first step and numbers them globally."""
        steps = {rank: next(self._steps(rank, count=False), None) for rank in self.files}
        if all(step is None for step in steps.values()):
            raise ValueError(
                f"trace {self.source}: empty, no routing records; record at least one training step"
            )
        stage_keys = []
        for stage in range(self.stages):
            keys = {}
            for column in self.columns:
                step = steps[column[stage]]
                if step is not None and not step.damaged:
                    keys.setdefault(frozenset(step.records), column[stage])
            if len(keys) > 1:
                self._refuse_uneven(keys)
            every = [set(steps[column[stage]].records) for column in self.columns if steps[column[stage]]]
            stage_keys.append(sorted(next(iter(keys)) if keys else set().union(*every), key=_key_order))
        if self.stages == 1:
            self._refuse_hidden_stages(steps, stage_keys[0])
        offsets = self._stage_offsets(stage_keys)
        self.keys = []
        for stage, keys in enumerate(stage_keys):
            for key in keys:
                block, mtp_idx, layer = key
                if block == DECODER:
                    layer_id = LayerId(DECODER, offsets[stage] + layer)
                else:
                    layer_id = LayerId(MTP, mtp_idx or 0, layer)
                self.keys.append((layer_id, stage, key))
        self.keys.sort(key=lambda entry: (entry[0].block, entry[0].layer, entry[0].inner_layer))
        return tuple(layer_id for layer_id, _, _ in self.keys)

    def _refuse_uneven(self, keys) -> None:
        (first, first_rank), (second, second_rank) = list(keys.items())[:2]
        block, mtp_idx, layer = min(first ^ second, key=_key_order)
        without = second_rank if (block, mtp_idx, layer) in first else first_rank
        having = first_rank if without == second_rank else second_rank
        name = f"layer {layer}" if block == DECODER else f"MTP layer {mtp_idx}"
        raise ValueError(
            f"trace {self.files[without]}: {name} is missing, rank {having} has it. Give "
            f"--pipeline-model-parallel-size if the run had several stages (found {self.stages}), or "
            "record again"
        )

    def _refuse_hidden_stages(self, steps, keys) -> None:
        """Raises ValueError when ranks taken for data parallel ones are stages of one pipeline."""
        choices = {}
        for rank, step in steps.items():
            if step is not None and not step.damaged:
                layers = [np.concatenate(step.records[key])[:, 0] for key in keys]
                if len({len(layer) for layer in layers}) == 1:
                    choices[rank] = np.stack(layers)
        stages = stages_of(choices) if len(choices) > 1 else []
        if stages:
            first = min(choices)
            fitting = len(self.files) // (stages[0] - first)
            raise ValueError(
                f"trace {self.source}: ranks {first} and {stages[0]} route the same tokens at different "
                "layers: they are pipeline stages with the same layer numbers; give "
                f"--pipeline-model-parallel-size of the run (found 1; {fitting} would fit)"
            )

    def _stage_offsets(self, stage_keys) -> list[int]:
        """Global number of each stage's first layer."""
        if self.stages == 1:
            return [0]
        used = [max((key[2] + 1 for key in keys if key[0] == DECODER), default=0) for keys in stage_keys]
        sizes = self.layers_per_stage or [max(used)]
        if len(sizes) == 1:
            sizes = sizes * self.stages
        if not self.layers_per_stage and len(set(used)) > 1 or len(sizes) != self.stages:
            raise ValueError(
                f"trace {self.source}: stages have {used} layers up to their last MoE layer; give "
                f"--layers-per-stage with 1 or {self.stages} numbers, so that layers can be numbered globally"
            )
        for stage, (size, needed) in enumerate(zip(sizes, used, strict=True)):
            if size < needed:
                raise ValueError(
                    f"--layers-per-stage {size} for stage {stage}: the trace has local layer {needed - 1} "
                    "there; give the number of decoder layers of each stage"
                )
        return [sum(sizes[:stage]) for stage in range(self.stages)]

    def blocks(self):
        """Yields [layers, tokens, topk] int32, one block per step."""
        self.num_lines = self.num_damaged = self.num_dropped = self.num_repeated = 0
        _allow_open_files(len(self.files))
        streams = {rank: self._steps(rank) for rank in self.files}
        heads = {rank: next(stream, None) for rank, stream in streams.items()}
        while any(head is not None for head in heads.values()):
            number = min(head.number for head in heads.values() if head is not None)
            step = {rank: h for rank, h in heads.items() if h is not None and h.number == number}
            for rank in step:
                heads[rank] = next(streams[rank], None)
            block = self._assemble(step, number)
            if block is not None:
                self.iteration = number
                yield block
        self.check_damage()

    def _assemble(self, step: dict, number: int):
        """[layers, tokens, topk] of one step in the order (record, rank), or None when nothing is whole."""
        columns, digests = [], set()
        for ranks in self.columns:
            column = self._column(step, ranks, number)
            if column is None:
                continue
            digest = blake2b(b"".join(record.tobytes() for record in column[0])).digest()
            if digest in digests:
                self.num_repeated += 1
                continue
            digests.add(digest)
            columns.append(column)
        if not columns:
            return None
        depth = max(len(column[0]) for column in columns)
        layers = []
        for index in range(len(self.keys)):
            pieces = [c[index][record] for record in range(depth) for c in columns if record < len(c[index])]
            layers.append(np.concatenate(pieces))
        return np.stack(layers)

    def _column(self, step: dict, ranks, number: int):
        """Per layer the records of one column ([layers][records] arrays), None when it is not whole."""
        if not any(rank in step for rank in ranks):
            return None
        if not all(rank in step for rank in ranks):
            self.num_dropped += 1
            return None
        column = [step[ranks[stage]].records.get(key, []) for _, stage, key in self.keys]
        extra = [key for rank in ranks for key in step[rank].records if not self._known(key)]
        column = self._without_repeats(column)
        shapes = [[record.shape for record in records] for records in column]
        if not extra and all(shape == shapes[0] for shape in shapes) and shapes[0]:
            return column
        if any(step[rank].damaged for rank in ranks):
            self.num_dropped += 1
            return None
        if extra:
            raise ValueError(
                f"trace {self.source}: step {number}, rank {ranks[0]}: layer {extra[0][2]} ({extra[0][0]}) is "
                "not in the first step; a layer's records are missing there; record again"
            )
        counts = [len(records) for records in column]
        usual = max(set(counts), key=counts.count)
        odd = next((i for i, s in enumerate(shapes) if len(s) != usual), None)
        if odd is None:
            odd = next(i for i, s in enumerate(shapes) if s != shapes[0])
        layer_id, stage, _ = self.keys[odd]
        raise ValueError(
            f"trace {self.files[ranks[stage]]}: step {number}: {layer_id} has {counts[odd]} records of shapes "
            f"{shapes[odd][:3]}, other layers have {usual}. A layer's records are missing (Megatron leaves out "
            "steps in which tokens were dropped) or virtual pipeline chunks collide; record without capacity "
            "dropping and without virtual pipeline stages"
        )

    def _known(self, key) -> bool:
        return any(key == known for _, _, known in self.keys)

    def _without_repeats(self, column):
        """Drops records that recomputation wrote again, in all layers alike."""
        unique = [list({record.tobytes(): record for record in records}.values()) for records in column]
        counts = {len(records) for records in column}
        if len(counts) == 1 and any(len(u) == len(r) for u, r in zip(unique, column, strict=True)):
            return column
        self.num_repeated += sum(len(r) - len(u) for u, r in zip(unique, column, strict=True))
        return unique

    def _steps(self, rank: int, count: bool = True):
        """Yields _Step after _Step of one rank's file."""
        current, damaged_before = None, False
        with open(self.files[rank], "rb") as file:
            for line in file:
                if not line.strip():
                    continue
                record = _parse(line)
                if count:
                    self.num_lines += 1
                    # A last line without its end was cut when the job stopped: dropped, no sign of damage.
                    self.num_damaged += record is None and line.endswith(b"\n")
                if record is None:
                    damaged_before = True
                    if current is not None:
                        current.damaged = True
                    continue
                number, key, top_indices = record
                if current is None or number != current.number:
                    if current is not None:
                        yield current
                        if number < current.number:
                            raise ValueError(
                                f"trace {self.files[rank]}: step {number} follows step {current.number}; "
                                "several runs in one file? record again into an empty folder"
                            )
                    current = _Step(number, damaged=damaged_before)
                damaged_before = False
                current.records.setdefault(key, []).append(top_indices)
        if current is not None:
            yield current

    def check_damage(self) -> None:
        """Raises ValueError when more than 5 % (and more than one) of the lines read so far are damaged."""
        if self.num_damaged > max(1, _DAMAGED_SHARE * self.num_lines):
            raise ValueError(
                f"trace {self.source}: {self.num_damaged} of {self.num_lines} lines are damaged, more than "
                f"{_DAMAGED_SHARE:.0%}; record again"
            )

    @property
    def notes(self) -> list[str]:
        """What was left out of the blocks read so far, one line each."""
        counts = (
            (self.num_damaged, "damaged lines left out"),
            (self.num_dropped, "incomplete (step, rank) groups left out"),
            (self.num_repeated, "repeated records (recomputation, or ranks with the same tokens) left out"),
        )
        return [f"trace {self.source}: {number} {what}" for number, what in counts if number]


def _parse(line: bytes):
    """(step, (block, mtp_idx, layer), [tokens, topk] int32) or None for a line that is damaged."""
    try:
        record = json.loads(line)
        top_indices = np.asarray(record["top_indices"], dtype=np.int32)
        if top_indices.shape != (record["num_tokens"], record["topk"]):
            return None
        key = (record["block"], record.get("mtp_idx"), int(record["layer"]))
        return int(record["step"]), key, top_indices
    except (ValueError, KeyError, TypeError, OverflowError):
        return None


def _key_order(key):
    block, mtp_idx, layer = key
    return block, -1 if mtp_idx is None else mtp_idx, layer


def _short(ranks) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _allow_open_files(count: int) -> None:
    """Every rank's file is open while steps are put together: raises the soft limit of open files if need be.

    Raises:
        ValueError: the hard limit is lower.
    """
    wanted = count + 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(
            f"a trace of {count} ranks needs {wanted} open files, this system allows {hard}: raise the hard limit "
            "(`ulimit -Hn`), or give the files of fewer ranks"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
