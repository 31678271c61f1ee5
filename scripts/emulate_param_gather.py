"""The schedule of the compressed gather on one GPU: rank 0 of two, the other rank and the wire emulated.

    scripts/emulate_param_gather.py --weights STEP1.npz STEP2.npz … [--same 0.78] [--links 25:30 9:250 265:20]

Both shards are equal, so what the other rank would send is what this one sends. A gather is a copy and a timed wait
on a stream of its own: bytes / GB_S + MICROSECONDS. What that leaves out: NCCL's kernels and their processors, the
other rank's delays, real links. It shows what the host, the encoder and the decoder take and what they hide, where no
two GPUs are at hand; bits, waits of the host and memory are checked as in bench_param_gather.py, whose figures count.
"""

import _path  # noqa: F401, I001
import argparse
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ciera.param_gather import bench, costs
from megatron_ciera.param_gather.bench import Bench, load_steps, run_mode, thin, tile_shard

RANKS = 2
COPY_BYTES_A_SECOND = 4e12  # of a device copy, read and written


class Wire:
    """Stands for all_gather_into_tensor. `seconds(bytes a rank)` is what a gather takes on the wire."""

    def __init__(self, gb_s: float, microseconds: float, device: torch.device):
        self._gb_s, self._latency, self._device = gb_s, microseconds / 1e6, device
        self._streams: dict = {}
        self._cycles = _cycles_a_second() if device.type == "cuda" else 0.0

    def seconds(self, num_bytes: int) -> float:
        return num_bytes / self._gb_s / 1e9 + self._latency

    def all_gather(self, gathered, own, group=None, async_op=False):
        parts, source = gathered.view(torch.uint8).view(RANKS, -1), own.view(torch.uint8).view(-1)
        others = [part for part in parts if part.data_ptr() != source.data_ptr()]
        if self._device.type != "cuda":
            for part in others:
                part.copy_(source)
            return Arrival(None)
        caller, stream = torch.cuda.current_stream(0), self._stream(group)
        stream.wait_stream(caller)
        torch.cuda.set_stream(stream)
        for part in others:
            part.copy_(source)
        rest = self.seconds(source.numel()) - 2 * source.numel() / COPY_BYTES_A_SECOND
        if rest > 0:
            torch.cuda._sleep(int(rest * self._cycles))
        event = torch.cuda.Event()
        event.record(stream)
        torch.cuda.set_stream(caller)
        arrival = Arrival(event)
        return arrival if async_op else arrival.wait()

    def _stream(self, group):
        """One a process group, as NCCL has; the exchange's own group is urgent."""
        if group not in self._streams:
            urgent = group is not None and group is not dist.group.WORLD
            self._streams[group] = torch.cuda.Stream(priority=-1 if urgent else 0)
        return self._streams[group]


class Arrival:
    def __init__(self, event):
        self._event = event

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(0).wait_event(self._event)


class Twins(Bench):
    """Both ranks hold the same shard."""

    def _tiled(self, step, shard: int) -> torch.Tensor:
        return torch.cat(RANKS * [tile_shard(step, shard, 0, self.device)]).view(bench.DTYPE)


def _cycles_a_second() -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(10_000_000)
    begin.record()
    torch.cuda._sleep(20_000_000)
    end.record()
    end.synchronize()
    return 20e6 / (begin.elapsed_time(end) / 1e3)


def _nothing(*args, **kwargs) -> None:
    pass


def emulate(wire: Wire) -> None:
    """Puts the wire in the place of torch.distributed's collectives, in this process."""
    dist.all_gather_into_tensor = wire.all_gather
    dist.all_reduce = dist.barrier = _nothing
    costs.has_nccl = lambda group: torch.cuda.is_available()


def _line(link: str, mode: str, raw: float, found: dict) -> str:
    return (
        f"{link:<8} {mode:<6} {found['milliseconds']:7.3f} of {raw:7.3f} ms, {raw / found['milliseconds']:.2f}x, "
        f"ratio {found['ratio']:.3f}, encode {found.get('encode_ms', 0):.2f} "
        f"decode {found.get('decode_ms', 0):.2f} ms, {found['pieces']} pieces, {found['exchanges']:.0f} waits, "
        f"memory {found['extra_bytes'] / 2**20:.1f} of stated {found['stated_bytes'] / 2**20:.1f} MB"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", required=True)
    parser.add_argument("--same", type=float, default=None)
    parser.add_argument(
        "--links", nargs="+", default=["25:30", "9:250", "265:20"], metavar="GB_S:MICROSECONDS"
    )
    parser.add_argument("--num-values", type=int, default=1 << 28)
    parser.add_argument("--modes", nargs="+", default=["delta", "auto"])
    parser.add_argument("--coder", default="auto")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    steps = load_steps(options.weights)
    twins = Twins(steps if options.same is None else thin(steps, options.same), options.num_values, 1, device)
    for link in options.links:
        emulate(Wire(*map(float, link.split(":")), device))
        raw = 1e3 * float(np.median(twins.seconds(None, options.repeats)))
        for mode in options.modes:
            found = run_mode(twins, mode, options)
            print(_line(link, mode, raw, found), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
