"""Gloo worlds of a few processes in which gathers run on plain tensors, without Megatron."""

import os
import tempfile
from collections.abc import Callable

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


def run_world(size: int, body: Callable, *args) -> list:
    """`body(rank, *args)` on `size` processes with a gloo world; the results by rank. Its exceptions are raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_enter, (size, folder, body, args), nprocs=size, start_method="spawn")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def _enter(rank: int, size: int, folder: str, body: Callable, args: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    result = body(rank, *args)
    dist.barrier()
    torch.save(result, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


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
