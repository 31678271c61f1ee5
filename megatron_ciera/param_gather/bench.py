"""One link, one process a GPU: the compressed gather against the plain collective, parity before any time.

Run by scripts/bench_param_gather.py under torchrun; prints one JSON object on rank 0. Without a GPU it runs over
gloo, which shows that it works and nothing else.
"""

import argparse
import json
import os
import time

import numpy as np
import torch
import torch.distributed as dist

from megatron_ciera.errors import ConfigurationError
from megatron_ciera.param_gather.bucket import GatherBucket
from megatron_ciera.param_gather.codec_choice import agree_on_codecs
from megatron_ciera.param_gather.costs import plan_pieces
from megatron_ciera.param_gather.decider import Decider, Policy
from megatron_ciera.param_gather.exchange import Exchange
from megatron_ciera.param_gather.group import Round, ShardGroup, Tuning
from megatron_ciera.param_gather.lanes import Stopwatch, make_lanes
from megatron_ciera.param_gather.layout import ClassRun, parameter_class
from megatron_ciera.param_gather.ledger import Ledger
from megatron_ciera.param_gather.process_groups import make_own_groups
from megatron_ciera.param_gather.transfer import Ring

DTYPE = torch.bfloat16

# name: (codec, selection, overlap)
MODES = {
    "delta": ("delta", False, True),
    "exponent-reuse": ("exponent-reuse", False, False),
    "exponent-reuse +selection": ("exponent-reuse", True, False),
    "exponent-reuse +selection +overlap": ("exponent-reuse", True, True),
    "auto": ("auto", True, True),
}


def load_steps(files: list[str]) -> list[dict[str, np.ndarray]]:
    """The words (uint16) of consecutive steps, by parameter name."""
    steps = []
    for file in files:
        with np.load(file) as arrays:
            steps.append({name: arrays[name].reshape(-1) for name in arrays.files})
    return steps


def tile_shard(
    step: dict[str, np.ndarray], num_values: int, turn: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """One rank's shard, int16 `[num_values]`: every parameter repeated in one run, each rank from another start."""
    total = sum(values.size for values in step.values())
    parts = []
    for values, (start, end) in zip(step.values(), _bounds(step, num_values, total), strict=True):
        words = torch.from_numpy(values.view(np.int16)).to(device).roll(64 * turn)
        parts.append(words.repeat(-(-(end - start) // words.numel()))[: end - start])
    return torch.cat(parts)


def shard_runs(step: dict[str, np.ndarray], num_values: int) -> list[ClassRun]:
    """Where which class lies in such a shard."""
    total = sum(values.size for values in step.values())
    return [
        ClassRun(start, end, parameter_class(name))
        for name, (start, end) in zip(step, _bounds(step, num_values, total), strict=True)
    ]


def _bounds(step: dict[str, np.ndarray], num_values: int, total: int) -> list[tuple[int, int]]:
    """Shares of the shard in proportion to the parameters' sizes, at multiples of 64 values."""
    ends = np.cumsum([values.size for values in step.values()]) * num_values // total // 64 * 64
    ends[-1] = num_values
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))


def thin(steps: list[dict[str, np.ndarray]], same: float, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Steps in which a share `same` of the values keeps its bits: changes are taken back at random."""
    rng = np.random.default_rng(seed)
    thinned = [steps[0]]
    for step in steps[1:]:
        changes = sum(int((step[name] != thinned[-1][name]).sum()) for name in step)
        total = sum(values.size for values in step.values())
        keep = min(1.0, (1 - same) * total / changes)
        after = {}
        for name, values in step.items():
            before = thinned[-1][name]
            back = (values != before) & (rng.random(values.size) >= keep)
            after[name] = np.where(back, before, values)
        thinned.append(after)
    return thinned


class Bench:
    """Buckets of real weights, tiled, whose own shard steps through the given words."""

    def __init__(self, steps, num_values: int, num_buckets: int, device: torch.device):
        self.device, self.size, self.rank = device, dist.get_world_size(), dist.get_rank()
        shard = num_values // (num_buckets * self.size) // 128 * 128
        self.num_values = shard * self.size * num_buckets
        self.steps = [[self._tiled(step, shard)] * num_buckets for step in steps]
        self.values = [part.clone() for part in self.steps[0]]
        self.runs = [
            ClassRun(run.start + rank * shard, run.end + rank * shard, run.kind)
            for rank in range(self.size)
            for run in shard_runs(steps[0], shard)
        ]
        (self.own,) = make_own_groups([dist.group.WORLD]).values()
        self._position = 0

    def _tiled(self, step: dict[str, np.ndarray], shard: int) -> torch.Tensor:
        shards = [tile_shard(step, shard, rank, self.device) for rank in range(self.size)]
        return torch.cat(shards).view(DTYPE)

    def group(self, mode: str, coder: str, warmup: int, tuning: Tuning | None = None) -> ShardGroup:
        codec, select, overlap = MODES[mode]
        lanes, ledger, tuning = make_lanes(self.device, overlap), Ledger(), tuning or Tuning()
        codecs, _ = agree_on_codecs(codec, coder, select, DTYPE, 512, self.device)
        shard = len(self.values[0]) // self.size
        costs, piece_values = plan_pieces(dist.group.WORLD, self.own, codecs, shard, DTYPE, overlap, tuning)
        buckets, slots = [], 0
        for index, values in enumerate(self.values):
            bucket = GatherBucket(
                f"bucket {index}", index, values, self.rank, self.size, self.runs, codecs, piece_values, slots
            )
            slots += bucket.num_slots
            buckets.append(bucket)
        policy = Policy(tuple(codecs), select, None, warmup, 512)
        decider = Decider(mode, buckets, codecs, policy, costs if select else None, lambda line: None)
        exchange = Exchange(self.own, slots, decider.num_counts, self.device, lanes, ledger)
        ring = Ring(tuning.num_slots, self.device)
        args = (buckets, exchange, ring, lanes, ledger, warmup, tuning, Round(), decider)
        return ShardGroup(mode, dist.group.WORLD, *args)

    def step(self, group: ShardGroup | None) -> None:
        """The own shard takes its next words: forth through the steps and back."""
        if group is not None:
            group.stepped()
        turn = 2 * (len(self.steps) - 1)
        self._position = (self._position + 1) % turn
        index = min(self._position, turn - self._position)
        self.expected = self.steps[index]
        for values, new in zip(self.values, self.expected, strict=True):
            shard = slice(self.rank * len(values) // self.size, (self.rank + 1) * len(values) // self.size)
            values[shard].copy_(new[shard])

    def gather(self, group: ShardGroup | None) -> None:
        for index, values in enumerate(self.values):
            if group is None:
                shard = values.chunk(self.size)[self.rank]
                dist.all_gather_into_tensor(values, shard)
            else:
                group.gather(group.buckets[index]).wait()

    def check(self, mode: str) -> None:
        """Raises RuntimeError on every rank if any holds other bits than expected."""
        same = all(
            torch.equal(a.view(torch.int16), b.view(torch.int16))
            for a, b in zip(self.values, self.expected, strict=True)
        )
        bad = torch.tensor(0 if same else 1, device=self.device)
        dist.all_reduce(bad)
        if bad:
            raise RuntimeError(f"{mode}: gathered bits differ from the plain gather's on {int(bad)} ranks")

    def seconds(self, group: ShardGroup | None, repeats: int) -> list[float]:
        """Time of each gather, of the slowest rank: encode, sizes, wire and decode, everything."""
        times = []
        for _ in range(repeats):
            self.step(group)
            self._settle()
            begin = time.perf_counter()
            self.gather(group)
            # The parameters are there; states are brought up to date beside what the compute stream does next.
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            times.append(time.perf_counter() - begin)
        slowest = torch.tensor(times, dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.tolist()

    def _settle(self) -> None:
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _same(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
    """Share of values with equal bits."""
    equal = sum(int((before[name] == after[name]).sum()) for name in before)
    return equal / sum(values.size for values in before.values())


def run_mode(bench: Bench, mode: str, options) -> dict:
    """Parity over a turn of the steps, then times, bytes and memory of one mode."""
    held_before = allocated(bench.device)
    group = bench.group(mode, options.coder, warmup=2)
    for _ in range(6):
        bench.step(group)
        bench.gather(group)
        bench.check(mode)
    group.ledger.take(_COUNTED)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = bench.seconds(group, options.repeats)
    raw, sent, mean, coded, exchanges = group.ledger.take(_COUNTED)
    for _ in range(Stopwatch.EVERY):
        gather_without_waits(bench, group)
    watch = {f"{name}_ms": value for name, value in group._lane.watch.read().items()}
    bench.check(mode)
    group.check_damage()
    memory = group.memory | {"ring": group._ring.num_bytes}
    used = [row.codecs for row in group._decider.decision.rows]
    return {
        "milliseconds": 1e3 * float(np.median(times)),
        "milliseconds_p90": 1e3 * float(np.quantile(times, 0.9)),
        "ratio": sent / raw,
        "ratio_unpadded": mean / raw if coded else 1.0,
        "coded_gathers": coded / options.repeats,
        "exchanges": exchanges / options.repeats,
        "pieces": [len(bucket.pieces) for bucket in group.buckets],
        "codecs": sorted({codec for codecs in used for codec in codecs}),
        "memory_bytes": memory,
        "stated_bytes": sum(memory.values()),
        "extra_bytes": allocated(bench.device, peak=True) - held_before,
        **watch,
    }


_COUNTED = ("bytes_raw", "bytes_sent", "bytes_payload_mean", "coded_gathers", "exchanges")


def allocated(device: torch.device, peak: bool = False) -> int:
    """Bytes that PyTorch's allocator has given out now, or at most since its peak was reset; 0 on CPU."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def gather_without_waits(bench: Bench, group: ShardGroup) -> None:
    """A step and its gather; RuntimeError if the host waits for the device anywhere but in the exchange's event."""
    cuda = bench.device.type == "cuda"
    if cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        bench.step(group)
        bench.gather(group)
    finally:
        if cuda:
            torch.cuda.set_sync_debug_mode("default")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", nargs="+", required=True)
    parser.add_argument("--same", type=float, default=None)
    parser.add_argument("--num-values", type=int, required=True)
    parser.add_argument("--num-buckets", type=int, default=1)
    parser.add_argument("--coder", default="auto")
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    steps = load_steps(options.weights)
    if options.same is not None:
        steps = thin(steps, options.same)
    bench = Bench(steps, options.num_values, options.num_buckets, device)
    results: dict = {"modes": {}}
    for mode in options.modes:
        try:
            found = run_mode(bench, mode, options)
        except ConfigurationError as error:
            found = {"unavailable": str(error)}
        if "milliseconds" in found:
            bench.seconds(None, 3)
            found["raw_milliseconds"] = 1e3 * float(np.median(bench.seconds(None, options.repeats)))
            found["speedup"] = found["raw_milliseconds"] / found["milliseconds"]
        results["modes"][mode] = found
    raw = next((m["raw_milliseconds"] for m in results["modes"].values() if "raw_milliseconds" in m), None)
    moved = 2 * bench.num_values * (bench.size - 1) / bench.size
    results |= {
        "gpus": bench.size,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "values": bench.num_values,
        "buckets": options.num_buckets,
        "same_values": [_same(a, b) for a, b in zip(steps, steps[1:], strict=False)],
        "bus_gb_s": moved / raw / 1e6 if raw else None,
    }
    if bench.rank == 0:
        print("RESULT " + json.dumps(results), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
