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
- A run that was killed leaves files that end inside a line or one step apart: the last step is left out unless
  every rank has it whole. Any other step that a rank lacks is refused.
Tokens are taken in the order (step, record, rank).
"""

import resource
from hashlib import blake2b
from pathlib import Path

import numpy as np

from placement.file import DECODER, MTP, LayerId
from placement.rank_file import AGAIN, Step, last_step, rank_files, rank_of, steps
from placement.stage_check import StageCheck, stages_of

_MOST_RANKS_CHECKED = 8


def is_megatron_trace(path: Path) -> bool:
    """True for a router_trace_rank*.jsonl file or a folder that holds some."""
    return bool(rank_files(path)) if path.is_dir() else rank_of(path) is not None


class _NotWholeError(ValueError):
    """A step that not every rank has whole."""


class MegatronTrace:
    """Streams the rank files of one run, one step at a time.

    `paths`: folders, together of all ranks of a run, or files, which may be of some ranks only.
    """

    source_layers = None

    def __init__(self, paths, pipeline_parallel_size: int = 1, layers_per_stage: list[int] | None = None):
        self.files = {}
        for file in [file for path in paths for file in rank_files(Path(path))]:
            rank = rank_of(file)
            if rank in self.files:
                raise ValueError(
                    f"trace {file}: rank {rank} is given twice (also {self.files[rank]}); give one run at "
                    "a time"
                )
            self.files[rank] = file
        self.source = str(paths[0] if len(paths) == 1 else next(iter(self.files.values())).parent)
        self.stages = pipeline_parallel_size
        self.columns = self._columns(some_ranks_only=not any(Path(path).is_dir() for path in paths))
        self.layers_per_stage = layers_per_stage
        self._start()
        self.layer_ids = self._scan_layers()
        self._check_ends()

    def _start(self) -> None:
        self.num_repeated = 0
        self.iteration = self.left_out = None
        self.stage_check = StageCheck()

    def _columns(self, some_ranks_only: bool) -> list[list[int]]:
        """Ranks that see the same tokens, by stage: [columns][stages]."""
        ranks = self.ranks
        world = ranks[-1] + 1
        missing = sorted(set(range(world)) - set(ranks))
        if missing and (self.stages > 1 or not some_ranks_only):
            alone = "" if self.stages > 1 else "; to read the others alone, name their files"
            raise ValueError(
                f"trace {self.source}: no router_trace_rank{missing[0]}.jsonl (ranks missing: {short(missing)}), "
                f"wanted every rank from 0 to {ranks[-1]}; copy the files of all nodes, or record again{alone}"
            )
        if self.stages == 1:
            return [[rank] for rank in ranks]
        if world % self.stages:
            raise ValueError(
                f"trace {self.source}: {world} ranks with --pipeline-model-parallel-size {self.stages}: wanted a "
                f"number of ranks divisible by {self.stages}, because a rank's stage is rank // (ranks / stages); "
                "give the size of the traced run and all files of it"
            )
        width = world // self.stages
        return [[stage * width + column for stage in range(self.stages)] for column in range(width)]

    def _scan_layers(self) -> tuple[LayerId, ...]:
        """Finds the layers of each stage in the first step and numbers them globally."""
        firsts = {rank: next(steps(file), None) for rank, file in self.files.items()}
        if not any(step.records for step in firsts.values() if step):
            raise ValueError(
                f"trace {self.source}: empty, no routing records; record at least one training step (a run that "
                "loads a checkpoint trains up to --train-iters, counted from the first iteration)"
            )
        stage_keys = []
        for stage in range(self.stages):
            ranks = [column[stage] for column in self.columns]
            whole = {rank: firsts[rank] for rank in ranks if firsts[rank] and not firsts[rank].is_cut}
            keys = {}
            for rank, step in whole.items():
                keys.setdefault(frozenset(step.records), rank)
            if len(keys) > 1:
                self._refuse_uneven(keys)
            every = [set(firsts[rank].records) for rank in ranks if firsts[rank]]
            stage_keys.append(sorted(next(iter(keys)) if keys else set().union(*every), key=_key_order))
            self._refuse_hidden_stages(whole, stage_keys[-1])
        # A stage without MoE layers has nothing to trace: its files are empty.
        self.recorded = [
            column[stage] for column in self.columns for stage, keys in enumerate(stage_keys) if keys
        ]
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

    def _check_ends(self) -> None:
        """Raises ValueError when files end more than a step apart. Only their ends are read."""
        ends = {rank: last_step(self.files[rank]) for rank in self.recorded}
        furthest = max(ends, key=ends.get)
        for rank, end in ends.items():
            if end < max(0, ends[furthest] - 1):
                cause = "The file was cut, or is or holds another run's"
                if end < 0:
                    cause += ", or its pipeline stage has no MoE layers (--pipeline-model-parallel-size)"
                raise ValueError(
                    f"trace {self.files[rank]}: {f'ends at step {end}' if end >= 0 else 'has no whole record'}, "
                    f"{self.files[furthest].name} ends at step {ends[furthest]}; wanted the same step, or one less "
                    f"when the run was killed. {cause}: {AGAIN}"
                )

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

    def _refuse_hidden_stages(self, steps: dict[int, Step], keys) -> None:
        """Raises ValueError when ranks taken for data parallel ones are stages of one pipeline."""
        choices = {}
        for rank, step in steps.items():
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
                f"--pipeline-model-parallel-size of the run (found {self.stages}; {fitting} would fit)"
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
        self._start()
        _allow_open_files(len(self.files))
        streams = {rank: steps(file) for rank, file in self.files.items()}
        heads = {rank: next(stream, None) for rank, stream in streams.items()}
        while any(head is not None for head in heads.values()):
            number = min(head.number for head in heads.values() if head is not None)
            step = {rank: h for rank, h in heads.items() if h is not None and h.number == number}
            for rank in step:
                heads[rank] = next(streams[rank], None)
            try:
                block = self._assemble(step, number)
            except _NotWholeError:
                if self.iteration is None or any(head is not None for head in heads.values()):
                    raise
                self.left_out = (number, sum(s.num_records for s in step.values()))
                return
            self.iteration = number
            yield block

    def check_damage(self) -> None:
        """Whatever is not whole is refused while it is read: nothing to check."""

    def _assemble(self, step: dict[int, Step], number: int) -> np.ndarray:
        """[layers, tokens, topk] of one step in the order (record, rank)."""
        for rank in self.recorded:
            if rank not in step or step[rank].is_cut:
                found = "ends inside a line" if rank in step else "has no records"
                raise _NotWholeError(
                    f"trace {self.files[rank]}: {found} at step {number}, while other ranks have the step or "
                    f"later ones; wanted the whole step on every rank: {AGAIN}"
                )
        columns, digests = [], set()
        for index, ranks in enumerate(self.columns):
            column = self._column(step, ranks, number)
            if self.stages > 1 and index * self.stages < _MOST_RANKS_CHECKED:
                self._check_stages(ranks, column)
            digest = blake2b(b"".join(record.tobytes() for record in column[0])).digest()
            if digest in digests:
                self.num_repeated += 1
                continue
            digests.add(digest)
            columns.append(column)
        depth = max(len(column[0]) for column in columns)
        layers = []
        for index in range(len(self.keys)):
            pieces = [c[index][record] for record in range(depth) for c in columns if record < len(c[index])]
            layers.append(np.concatenate(pieces))
        return np.stack(layers)

    def _check_stages(self, ranks, column) -> None:
        """Raises ValueError when the ranks of a column are no stages of one pipeline."""
        stages = []
        for stage in range(self.stages):
            layers = [
                np.concatenate(records)[:, 0]
                for (layer_id, at, _), records in zip(self.keys, column, strict=True)
                if at == stage and layer_id.block == DECODER
            ]
            stages += [np.stack(layers)] if layers else []
        if self.stage_check.add(stages):
            raise ValueError(
                f"trace {self.source}: --pipeline-model-parallel-size {self.stages} makes ranks {short(ranks)} "
                "stages of one pipeline, but they do not route the same tokens: equal positions depend on each "
                "other inside a rank and not between them. Give the size of the traced run (1 when each rank "
                "ran all layers)"
            )

    def _column(self, step: dict[int, Step], ranks, number: int):
        """Per layer the records of one column: [layers][records] arrays."""
        for rank in ranks:
            extra = [key for key in (step[rank].records if rank in step else ()) if not self._known(key)]
            if extra:
                raise _NotWholeError(
                    f"trace {self.files[rank]}: step {number}: layer {extra[0][2]} ({extra[0][0]}) is not in the "
                    "first step; a layer's records are missing there; record again"
                )
        column = [step[ranks[stage]].records.get(key, []) for _, stage, key in self.keys]
        unique = self._without_repeats(column)
        shapes = [[record.shape for record in records] for records in unique]
        if any(shape != shapes[0] for shape in shapes) or not shapes[0]:
            self._refuse_missing_records(shapes, ranks, number)
        first = self.columns[0]
        for (layer_id, stage, key), records in zip(self.keys, column, strict=True):
            wanted = len(step[first[stage]].records.get(key, ()))
            if len(records) != wanted:
                raise _NotWholeError(
                    f"trace {self.files[ranks[stage]]}: step {number}: {layer_id} has {len(records)} records, "
                    f"{self.files[first[stage]].name} has {wanted}; wanted as many on every rank. Some are missing, "
                    f"or another run's were appended to one file: {AGAIN}"
                )
        return unique

    def _refuse_missing_records(self, shapes, ranks, number: int) -> None:
        counts = [len(shape) for shape in shapes]
        usual = max(set(counts), key=counts.count)
        odd = next((i for i, s in enumerate(shapes) if len(s) != usual), None)
        if odd is None:
            odd = next(i for i, s in enumerate(shapes) if s != shapes[0])
        layer_id, stage, _ = self.keys[odd]
        raise _NotWholeError(
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

    @property
    def ranks(self) -> list[int]:
        """The ranks that are read, ascending: all that the folder holds."""
        return sorted(self.files)

    @property
    def notes(self) -> list[str]:
        """What was left out of the blocks read so far and what could not be checked, one line each."""
        found = []
        if self.left_out:
            number, num_records = self.left_out
            found.append(
                f"the last step, {number}, left out ({num_records} whole records): not every rank has it whole, the "
                "run ended while writing it"
            )
        if self.num_repeated:
            found.append(
                f"{self.num_repeated} repeated records (recomputation, or ranks with the same tokens) left out"
            )
        if self.stages > 1 and not self.stage_check.is_shown:
            found.append(
                f"read as {self.stages} stages with {len(self.keys)} MoE layers in all, as "
                "--pipeline-model-parallel-size says; the records read cannot show whether that is so"
            )
        return [f"trace {self.source}: {note}" for note in found]


def _key_order(key):
    block, mtp_idx, layer = key
    return block, -1 if mtp_idx is None else mtp_idx, layer


def short(ranks) -> str:
    """The first eight of them."""
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
