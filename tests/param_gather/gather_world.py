"""Gloo worlds of a few processes in which gathers run on plain tensors, without Megatron."""

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_ciera.param_gather.bucket import GatherBucket
from megatron_ciera.param_gather.codec import make_codec
from megatron_ciera.param_gather.decider import Decider, Policy
from megatron_ciera.param_gather.exchange import Exchange
from megatron_ciera.param_gather.group import Round, ShardGroup, Tuning
from megatron_ciera.param_gather.lanes import make_lanes
from megatron_ciera.param_gather.layout import ClassRun
from megatron_ciera.param_gather.ledger import Ledger
from megatron_ciera.param_gather.transfer import Ring

SMALL = Tuning(piece_bytes=1 << 14, num_slots=2, wave_pieces=2)

_worlds: dict[int, list] = {}  # size -> (process, connection) of each rank


def run_world(size: int, body: Callable, *args, kept: bool = True) -> list:
    """`body(rank, *args)` on `size` processes with a gloo world; the results by rank. Its exceptions are raised.

    The processes are kept for the next world of that size, so `body` puts back what it changes. With `kept` False
    they are started for this one alone.
    """
    ranks = _worlds.pop(size, None) if kept else None
    ranks = ranks or _start(size)
    with tempfile.TemporaryDirectory() as folder:
        for _, connection in ranks:
            connection.send((folder, body, args))
        waited = [connection for _, connection in ranks]
        while waited:
            for connection in wait(waited):
                waited.remove(connection)
                try:
                    failure = connection.recv()
                except EOFError:
                    failure = "a rank has died"
                if failure is not None:
                    _end(ranks)
                    raise AssertionError(failure)
        if kept:
            _worlds[size] = ranks
        else:
            _end(ranks)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def _start(size: int) -> list:
    context, ranks = mp.get_context("spawn"), []
    for rank in range(size):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(rank, size, there), daemon=True)
        process.start()
        there.close()
        ranks.append((process, here))
    return ranks


def _end(ranks: list) -> None:
    for process, _ in ranks:
        process.kill()
        process.join()


def _serve(rank: int, size: int, connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while True:
        folder, body, args = connection.recv()
        try:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
            result = body(rank, *args)
            dist.barrier()
            torch.save(result, f"{folder}/{rank}.pt")
            dist.destroy_process_group()
            connection.send(None)
        except Exception:
            connection.send(f"rank {rank}: {traceback.format_exc()}")


class Model:
    """Buckets of one group whose true values every rank can compute: what an optimizer would have made of them.

    `expected[i]` is bucket i as it must be after the next gather; a rank's own copy gets only its own shard.
    """

    def __init__(
        self,
        sizes: list[int],
        runs: list[list[ClassRun]],
        dtype=torch.bfloat16,
        codec: str | Callable = "delta",
        warmup: int = 1,
        tuning: Tuning = SMALL,
        block_size: int = 512,
        policy: Policy | None = None,
        ranks: list[int] | None = None,
    ):
        self.dtype = dtype
        group = dist.new_group(ranks) if ranks else dist.group.WORLD
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.random = torch.Generator().manual_seed(1)
        device = torch.device("cpu")
        self.expected = [torch.randn(n, generator=self.random).mul_(0.02).to(dtype) for n in sizes]
        self.values = [values.clone() for values in self.expected]
        self.ledger, lanes = Ledger(), make_lanes(device)
        ring = Ring(tuning.num_slots, device)
        codecs = {name: make_codec(name, "auto", dtype, block_size) for name in ("delta", "exponent-reuse")}
        choose = codec if callable(codec) else lambda segment: codec
        buckets, slots = [], 0
        for index, values in enumerate(self.values):
            piece_values = max(1, tuning.piece_bytes // (self.size * values.element_size()))
            bucket = GatherBucket(
                f"bucket {index}",
                index,
                values,
                self.rank,
                self.size,
                runs[index],
                codecs,
                piece_values,
                slots,
            )
            bucket.choose(choose)
            slots += bucket.num_slots
            buckets.append(bucket)
        self.log: list[str] = []
        decider = Decider("test", buckets, codecs, policy, None, self.log.append) if policy else None
        counts = decider.num_counts if decider else 0
        exchange = Exchange(dist.new_group(ranks), slots, counts, device, lanes, self.ledger)
        self.group = ShardGroup(
            "test", group, buckets, exchange, ring, lanes, self.ledger, warmup, tuning, Round(), decider
        )

    def step(self, learning_rate: float = 3e-4) -> None:
        """Every value moves; this rank sees only its own shard move."""
        self.group.stepped()
        for index, values in enumerate(self.values):
            noise = torch.randn(values.numel(), generator=self.random)
            moved = (self.expected[index].float() + learning_rate * noise).to(self.dtype)
            self.set_next(index, moved)

    def set_next(self, index: int, moved: torch.Tensor) -> None:
        self.expected[index] = moved
        shard = moved.numel() // self.size
        own = slice(self.rank * shard, (self.rank + 1) * shard)
        self.values[index][own] = moved[own]

    def gather(self) -> None:
        for bucket in self.group.buckets:
            self.group.gather(bucket).wait()

    def gather_overlapped(self) -> None:
        """All dispatched before any is waited for, and waited for in another order."""
        handles = [self.group.gather(bucket) for bucket in self.group.buckets]
        for handle in reversed(handles):
            handle.wait()

    def exact(self) -> bool:
        """Whether this rank now holds the true bits of every shard."""
        return all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(self.values, self.expected, strict=True)
        )
