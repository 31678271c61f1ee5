"""Codec benchmark: parity first, then encode and decode speed and bits a value, by size; and the cost of
checking.

Speeds are raw-equivalent: bytes of the parameters over the time of the whole encode (difference, coding,
placing) or of the whole decode-and-apply (hash check and store included). Nothing is printed as a result when
a round trip is not bit-exact. Words are pairs before/after an optimizer step: two snapshots given as
arguments, grown to each size by copies whose values are shuffled (pairs stay together), so that no run of
bytes repeats; else Gaussian weights and an Adam-like step.
"""

import argparse
import json
import statistics
import sys
import time

import _path  # noqa: F401
import torch

from megatron_ciera.param_gather.codec import CODECS, as_words, make_codec, new_flags
from megatron_ciera.param_gather.codec.snapshots import load_pair

REPEATS = 9
CHECK_INTERVALS = range(1, 11)


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "snapshots", nargs="*", metavar="BEFORE AFTER", help="two consecutive weight snapshots"
    )
    parser.add_argument(
        "--sizes-mb", default=None, help="sizes in 10^6 raw bytes (default 1,4,16,64,256,1024; CPU 1,4,16)"
    )
    parser.add_argument("--codec", choices=CODECS, action="append", help="default: all")
    parser.add_argument(
        "--coder", choices=("ans", "packed"), action="append", help="default: all that work here"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument(
        "--unchanged", type=float, default=0.0, help="thin the changes to this share of unchanged values"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on standard output and nothing else"
    )
    args = parser.parse_args(argv)
    if len(args.snapshots) not in (0, 2):
        parser.error(f"{len(args.snapshots)} snapshots given, wanted two (BEFORE AFTER) or none")
    if not 0 <= args.unchanged < 1:
        parser.error(f"--unchanged {args.unchanged:g}: wanted a share from 0 up to, not including, 1")
    return args


def source_pairs(args) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """bf16 words before and after, one pair a tensor, on the device. ValueError if the snapshots hold none."""
    if args.snapshots:
        loaded = load_pair(*args.snapshots)
        pairs = [
            (old.view(-1).to(args.device), new.view(-1).to(args.device))
            for _, dtype, old, new in loaded
            if dtype is torch.bfloat16
        ]
        if not pairs:
            found = ", ".join(sorted({str(dtype) for _, dtype, _, _ in loaded}))
            raise ValueError(
                f"{args.snapshots[0]}: found parameters of {found}, wanted bf16: the benchmark codes bf16 words"
            )
        return pairs
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(1 << 20, generator=generator) * 0.02
    after = before + torch.randn(1 << 20, generator=generator) * 1.5e-4
    return [(as_words(before.bfloat16()).to(args.device), as_words(after.bfloat16()).to(args.device))]


def grow(pairs, count: int, unchanged: float, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of ``count`` values: shuffled copies of the pairs, one after the other. ValueError if they cannot
    have the share of unchanged values."""
    generator = torch.Generator(device).manual_seed(1)
    old, new = (torch.empty(count, dtype=pairs[0][0].dtype, device=device) for _ in range(2))
    start = 0
    while start < count:
        for before, after in pairs:
            order = torch.randperm(before.numel(), generator=generator, device=device)[: count - start]
            old[start : start + order.numel()] = before[order]
            new[start : start + order.numel()] = after[order]
            start += order.numel()
    if unchanged:
        for first in range(0, count, 1 << 26):
            part = slice(first, first + (1 << 26))
            same_now = float((old[part] == new[part]).double().mean())
            if same_now > unchanged:
                raise ValueError(
                    f"--unchanged {unchanged:g}: found {same_now:.3f} of the values unchanged already, wanted at "
                    "most that share: changes are thinned, never added"
                )
            keep = torch.rand(old[part].numel(), generator=generator, device=device) < (
                unchanged - same_now
            ) / (1 - same_now)
            new[part] = torch.where(keep, old[part], new[part])
    return old, new


def seconds(device, work, prepare=lambda: None) -> float:
    """Median time of ``work`` on an idle device; ``prepare`` runs before each repeat, outside the measured
    time."""
    times = []
    for repeat in range(REPEATS + 2):
        prepare()
        if torch.device(device).type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # A busy wait in front hides the host's launch time, as the training step does.
            torch.cuda._sleep(2_000_000)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            work()
            elapsed = time.perf_counter() - begin
        if repeat >= 2:
            times.append(elapsed)
    return statistics.median(times)


def measure(codec, old: torch.Tensor, new: torch.Tensor) -> dict:
    """Parity, then speed, of one codec on one segment. RuntimeError when a bit differs."""
    device = codec.device
    state = codec.new_state(old)
    out = torch.empty(codec.bound(new.numel()), dtype=torch.uint8, device=device)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    target, flags = old.clone(), new_flags(1, device)
    codec.encode(new, state, out, size)
    payload = out[: int(size)].clone()
    codec.decode_apply(payload, target, flags)
    if int(flags[0, 0]) or not torch.equal(target, new):
        raise RuntimeError(
            f"{codec.name}/{codec.coder_name}: the round trip is not bit-exact: {flags.tolist()}"
        )
    nbytes = new.numel() * new.element_size()
    encode = seconds(device, lambda: codec.encode(new, state, out, size))
    decode = seconds(device, lambda: codec.decode_apply(payload, target, flags), lambda: target.copy_(old))
    return {
        "codec": codec.name,
        "coder": codec.coder_name,
        "megabytes": nbytes / 1e6,
        "bits_per_value": 8 * payload.numel() / new.numel(),
        "encode_gb_s": nbytes / encode / 1e9,
        "decode_gb_s": nbytes / decode / 1e9,
    }


def check_cost(codec, old: torch.Tensor) -> list[dict]:
    """The paper's Observation 5: milliseconds an iteration of hashing all exponents at check intervals 1 to
    10."""
    state = codec.new_state(old)
    cost = []
    for interval in CHECK_INTERVALS:

        def ten_intervals(interval=interval):
            for iteration in range(10 * interval):
                if iteration % interval == 0:
                    codec.update_state(old, state)

        cost.append(
            {
                "interval": interval,
                "milliseconds": seconds(codec.device, ten_intervals) / (10 * interval) * 1e3,
            }
        )
    return cost


def main(argv=None) -> int:
    args = parse(argv)
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    sizes = args.sizes_mb or ("1,4,16,64,256,1024" if device.type == "cuda" else "1,4,16")
    try:
        pairs = source_pairs(args)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    say = (lambda *_: None) if args.json else print
    report = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, one thread",
        "torch": torch.__version__,
        "data": args.snapshots or "synthetic",
        "unchanged": args.unchanged,
        "parity": True,
        "results": [],
        "skipped": [],
        "check": None,
    }
    codecs = []
    for name in args.codec or CODECS:
        for coder in args.coder or ("ans", "packed"):
            try:
                codecs.append(make_codec(name, coder, torch.bfloat16, args.block_size, device))
            except (ValueError, ImportError, OSError) as error:
                report["skipped"].append(f"{name}/{coder}: {error}")
                say(report["skipped"][-1])
    say(f"{'codec':16}{'coder':8}{'MB':>8}{'bits/value':>12}{'encode GB/s':>13}{'decode GB/s':>13}")
    for size in map(float, sizes.split(",")):
        try:
            old, new = grow(pairs, int(size * 1e6) // 2, args.unchanged, device)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        for codec in codecs:
            row = measure(codec, old, new)
            report["results"].append(row)
            say(
                f"{row['codec']:16}{row['coder']:8}{row['megabytes']:8.0f}{row['bits_per_value']:12.3f}"
                f"{row['encode_gb_s']:13.2f}{row['decode_gb_s']:13.2f}"
            )
    hashed = [codec for codec in codecs if codec.name == "exponent-reuse"]
    if hashed:
        report["check"] = {"megabytes": old.numel() * 2 / 1e6, "intervals": check_cost(hashed[-1], old)}
        say(
            f"checking exponents of {old.numel() * 2 / 1e6:.0f} MB, ms an iteration at intervals 1-10: "
            + " ".join(f"{row['milliseconds']:.3f}" for row in report["check"]["intervals"])
        )
    if args.json:
        json.dump(report, sys.stdout)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
