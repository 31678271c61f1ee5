"""Step times of one real training run whose dispatcher changes between iterations: stock, ours, ours with placement.

One process group, one model, one link: what differs between two phases is the dispatcher alone. See `main`.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from megatron_ciera.feature import Feature
from megatron_ciera.launch import prepare
from placement.cli_common import output_file

STOCK, DEDUP, PLACED, CORRELATED = "stock", "dedup", "dedup, contiguous placement", "dedup + correlated"
WARMUP = 3


def arguments() -> argparse.ArgumentParser:
    """The command line in front of `--`; Megatron's flags follow it."""
    parser = argparse.ArgumentParser(
        description="torchrun … scripts/bench_dispatch.py --training [options] -- <Megatron flags>"
    )
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--label", default="", help="what the link stands for")
    parser.add_argument("--iterations", type=int, default=6, help="of a phase; its first is not counted")
    parser.add_argument("--fit-tokens", type=int, default=4096)
    parser.add_argument("--no-repeat", action="store_true", help="stock and dedup once, not twice")
    parser.add_argument(
        "--no-placement", action="store_true", help="stock and dedup alone; also runs on one GPU"
    )
    parser.add_argument("--profile", action="store_true", help="host time of one more iteration of each")
    parser.add_argument("--output", type=output_file, default=None, help="also write the JSON here")
    parser.add_argument("--json", action="store_true")
    return parser


def phases(options) -> list[tuple[str, int]]:
    """(name, iterations) in order. The placed phase is as long as the fit in the run takes to be applied."""
    counted = options.iterations
    order = [(STOCK, WARMUP + counted), (DEDUP, counted)]
    if not options.no_repeat:
        order += [(STOCK, counted), (DEDUP, counted)]
    return order if options.no_placement else [*order, (PLACED, 6), (CORRELATED, counted)]


class Rotation(Feature):
    """Puts another dispatcher into every MoE layer when a phase begins, and times the steps in between.

    Called before the MoE feature attaches its own dispatcher and before it moves experts.
    """

    name = "dispatch benchmark"

    def __init__(self, options):
        self.options = options
        self.schedule = [name for name, length in phases(options) for _ in range(length)]
        self.seconds = [0.0] * len(self.schedule)
        self.peaks = [0] * len(self.schedule)
        self.rows = {}
        self.profiles = {}
        self._dispatchers = []
        self._begun = 0.0

    def model_built(self, model_chunks: list) -> None:
        from megatron_ciera.moe.layer import attach_counter, attach_dispatcher
        from megatron_ciera.moe.sites import find_sites

        for site in find_sites(model_chunks):
            stock = site.layer.token_dispatcher
            attach_dispatcher(site.layer)
            attach_counter(site.layer)
            self._dispatchers.append((site.layer, {STOCK: stock, DEDUP: site.layer.token_dispatcher}))
            site.layer.token_dispatcher = stock

    def loaded(self, model_chunks: list, optimizer, iteration: int) -> None:
        for layer, known in self._dispatchers:
            known[PLACED] = known[CORRELATED] = layer.token_dispatcher

    def before_step(self, iteration: int) -> None:
        name = self.schedule[iteration - 1]
        for layer, known in self._dispatchers:
            layer.token_dispatcher = known[name]
        profiled = self.options.profile and self._is_last(iteration) and name in (STOCK, DEDUP)
        self._profiler = (
            torch.profiler.profile(activities=[ProfilerActivity.CPU]) if profiled else nullcontext()
        )
        torch.cuda.synchronize()
        dist.barrier()
        if dist.get_backend() == "nccl":
            torch.cuda.reset_peak_memory_stats()
        self._profiler.__enter__()
        self._begun = time.perf_counter()

    def after_step(self, iteration: int) -> None:
        torch.cuda.synchronize()
        self.seconds[iteration - 1] = time.perf_counter() - self._begun
        if dist.get_backend() == "nccl":
            self.peaks[iteration - 1] = torch.cuda.max_memory_allocated()
        self._profiler.__exit__(None, None, None)
        if not isinstance(self._profiler, nullcontext):
            self.profiles[self.schedule[iteration - 1]] = _host_times(self._profiler)
            self.seconds[iteration - 1] = float("nan")
        if iteration == len(self.schedule):
            self._report()

    def logged(self, iteration: int, values: dict[str, float]) -> None:
        name = self.schedule[iteration - 1]
        if name in (PLACED, CORRELATED):
            self.rows[name] = {
                key: values[f"moe/{key}"] for key in ("rows_stock", "rows_sent", "bytes_sent", "rows_removed")
            }

    def _report(self) -> None:
        worst = torch.tensor(
            [self.seconds, self.peaks], device=torch.cuda.current_device(), dtype=torch.float64
        )
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            result = self.result(*worst.tolist())
            text = json.dumps(result)
            if self.options.output:
                with open(self.options.output, "w") as file:
                    file.write(text + "\n")
            for name, table in self.profiles.items():
                print(f"one iteration, {name}\n{table}")
            print(text if self.options.json else table_of(result), flush=True)

    def result(self, seconds: list[float], peaks: list[float]) -> dict:
        """Medians by phase; each phase's first iteration, the warm-up and profiled iterations are left out.

        Args: of each iteration, the slowest rank's seconds and the fullest rank's peak memory in bytes.
        """
        found, first = [], 0
        for place, (name, length) in enumerate(phases(self.options)):
            skip = WARMUP + 1 if place == 0 else 1
            times = [1e3 * value for value in seconds[first + skip : first + length] if value == value]
            peak = max(peaks[first : first + length])
            first += length
            found.append(
                {
                    "variant": name,
                    "milliseconds": statistics.median(times),
                    "all": [round(value, 1) for value in times],
                    "peak_mb": peak / 1e6,
                    **self.rows.get(name, {}),
                }
            )
        return {"label": self.options.label, "phases": found}

    def _is_last(self, iteration: int) -> bool:
        return iteration == len(self.schedule) or self.schedule[iteration] != self.schedule[iteration - 1]


def _host_times(profiler) -> str:
    """The operations that took most of the host's time: milliseconds of their own, calls, name."""
    averages = profiler.key_averages()
    costly = sorted(averages, key=lambda entry: -entry.self_cpu_time_total)[:40]
    lines = [f"{entry.self_cpu_time_total / 1e3:9.2f} {entry.count:7d} {entry.key}" for entry in costly]
    total = sum(entry.self_cpu_time_total for entry in averages) / 1e3
    return "\n".join([f"{total:9.2f} {sum(entry.count for entry in averages):7d} all", *lines])


def table_of(result: dict) -> str:
    """The result as text."""
    base = result["phases"][0]["milliseconds"]
    lines = [
        f"{result['label']}: training step, median of the slower rank",
        "variant | ms | of stock | peak MB | rows",
    ]
    for phase in result["phases"]:
        rows = f"{phase['rows_sent']} of {phase['rows_stock']}" if "rows_sent" in phase else ""
        lines.append(
            f"{phase['variant']:28s} | {phase['milliseconds']:7.1f} | {phase['milliseconds'] / base:5.3f} | "
            f"{phase['peak_mb']:7.0f} | {rows} {phase['all']}"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Trains with Megatron's flags behind `--`, one phase after another, and reports the step times.

    Give many `--train-iters`: a fit is applied only where it repays until they end. The run stops by itself.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    options = arguments().parse_args(argv[:split])
    length = sum(count for _, count in phases(options))
    ours = f"--exit-interval {length} --log-interval 1"
    if not options.no_placement:
        fit_at = length - options.iterations - 5
        ours += f" --correlated-placement --placement-refit-interval 0 --placement-fit-iteration {fit_at}"
        ours += f" --placement-fit-tokens {options.fit_tokens}"
    sys.argv = [sys.argv[0], *argv[split + 1 :], *ours.split()]
    prepare(in_front=[Rotation(options)])
    import pretrain_gpt  # beside scripts/bench_dispatch.py

    pretrain_gpt.main()
    return 0
