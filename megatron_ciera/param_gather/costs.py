"""Times measured at start on the job's own process groups: the gather, the exchange, each codec. CUDA only."""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from megatron_ciera.param_gather.codec import Codec, as_words, new_flags
from megatron_ciera.param_gather.pieces import choose_piece_values
from megatron_ciera.param_gather.selection import Costs, Curve

_COMM_BYTES = tuple(1 << shift for shift in (14, 17, 20, 22, 24, 26))
_CODEC_VALUES = tuple(1 << shift for shift in (14, 18, 21, 24))
_REPEATS = 5


def plan_pieces(
    group, exchange_group, codecs: Mapping[str, Codec], largest_shard: int, dtype, overlap: bool, tuning
) -> tuple[Costs | None, int]:
    """Measured costs (None without a GPU), and the limit of a piece's values that suits them. Collective.

    `tuning`: group.Tuning, whose `piece_bytes` bounds the pieces in any case.
    """
    size = dist.get_world_size(group)
    itemsize = torch.empty(0, dtype=dtype).element_size()
    most = max(1, tuning.piece_bytes // (size * itemsize))
    if not has_nccl(group):
        return None, most
    costs = measure_costs(group, exchange_group, codecs, largest_shard, dtype, overlap)
    if not overlap or size == 1:
        return costs, most
    sizes = largest_shard, most, itemsize, size
    return costs, choose_piece_values(*sizes, next(iter(codecs)), costs, tuning.num_slots, tuning.wave_pieces)


def has_nccl(group) -> bool:
    """Whether times on this group mean anything."""
    return torch.cuda.is_available() and dist.get_backend(group) == "nccl"


def measure_costs(
    group, exchange_group, codecs: Mapping[str, Codec], largest_shard: int, dtype, overlap: bool
) -> Costs:
    """Measures on every rank of the group and agrees on the slowest. NOTE: synchronises; for the start only.

    Args:
        group: that carries the gathers.
        exchange_group: that carries the sizes.
        largest_shard: values of the largest bucket's shard; nothing much larger is tried.
        overlap: whether pieces are decoded while the next is on the wire.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    itemsize = torch.empty(0, dtype=dtype).element_size()
    sizes = [size for size in _COMM_BYTES if size <= 2 * largest_shard * itemsize] or [_COMM_BYTES[0]]
    comm = _agree([_time_gather(group, size, device) for size in sizes], group, device)
    values = [count for count in _CODEC_VALUES if count <= 2 * largest_shard] or [_CODEC_VALUES[0]]
    encode, decode = {}, {}
    for name, codec in codecs.items():
        times = [_time_codec(codec, count, dtype, device) for count in values]
        encode[name] = _curve(values, _agree([t[0] for t in times], group, device))
        decode[name] = _curve(values, _agree([t[1] for t in times], group, device))
    exchange = _agree([_time_gather(exchange_group, 4096, device, to_host=True)], group, device)[0]
    return Costs(_curve(sizes, comm), encode, decode, exchange, overlap)


def _curve(sizes, seconds) -> Curve:
    return Curve(tuple(map(float, sizes)), tuple(seconds))


def _time_gather(group, num_bytes: int, device, to_host: bool = False) -> float:
    own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    everyone = torch.empty(num_bytes * dist.get_world_size(group), dtype=torch.uint8, device=device)

    def gather():
        dist.all_gather_into_tensor(everyone, own, group=group)
        if to_host:
            everyone[:8].cpu()

    return _seconds(gather)


def _time_codec(codec: Codec, count: int, dtype, device) -> tuple[float, float]:
    """Seconds to encode and to decode `count` values after a step like those of training."""
    generator = torch.Generator(device).manual_seed(count)
    before = torch.randn(count, generator=generator, device=device).mul_(0.02)
    after = before + 2e-4 * torch.randn(count, generator=generator, device=device)
    old, new = as_words(before.to(dtype)), as_words(after.to(dtype))
    state = codec.new_state(old)
    out = torch.empty(codec.bound(count), dtype=torch.uint8, device=device)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    encode = _seconds(lambda: codec.encode(new, state, out, size))
    flags = new_flags(1, device)
    # A payload can be applied once: a second time its hashes fail.
    targets = iter([old.clone() for _ in range(_REPEATS + 1)])
    decode = _seconds(lambda: codec.decode_apply(out, next(targets), flags))
    return encode, decode


def _seconds(run: Callable[[], None]) -> float:
    """Median of a few runs after one to warm up."""
    run()
    times = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[_REPEATS // 2]


def _agree(seconds: list[float], group, device) -> list[float]:
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return slowest.tolist()
