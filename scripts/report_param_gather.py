"""Everything that docs/results says about the parameter gather on one host with GPUs, from one command.

    scripts/report_param_gather.py --weights STEP1.npz STEP2.npz … --output FOLDER [--stages parity bench steps]

parity: training of a small model, stock against stock and then against --ciera, bit for bit, in deterministic mode.
bench:  scripts/bench_param_gather.py on each emulated link, on the deltas as they are and thinned.
steps:  iteration times and peak memory of a MoE model with and without --ciera, per link: gradients in fp32 and bf16,
        overlap, and the paper's ablation.
A table comes last; FOLDER/report.json has everything, FOLDER/*.log what was printed.
"""

import _path  # noqa: F401, I001
import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _runs import LINKS, LOCAL, SCRIPTS, train
from megatron_ciera.comparison import compare
from megatron_ciera.errors import output_folder

SMALL = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 256 --seq-length 128 --max-position-embeddings 128 --vocab-size 1023 "
    "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 500 --deterministic-mode"
).split()
MODEL = (
    "--num-layers 8 --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 16 --num-experts 64 "
    "--moe-router-topk 6 --moe-ffn-hidden-size 512 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 32767 --micro-batch-size 1 --global-batch-size 4 --lr 3.8e-4 --min-lr 3.8e-5 --lr-decay-iters 1000 "
    "--lr-warmup-iters 0 --timing-log-level 1"
).split()
OVERLAP = "--overlap-grad-reduce --overlap-param-gather".split()
CIERA = "--ciera --ciera-warmup-iters 4".split()
REUSE = [*CIERA, "--ciera-codec", "exponent-reuse"]
BF16 = ["--grad-reduce-in-bf16"]
# The runs of `steps`. Those of BASIC are made on every link, the others on the last one that is named.
BASIC = ("plain", "auto")
STEPS = {
    "plain": [],
    "auto": CIERA,
    "plain, bf16 gradients": BF16,
    "auto, bf16 gradients": [*CIERA, *BF16],
    "plain, overlap": OVERLAP,
    "auto, overlap": [*CIERA, *OVERLAP],
    "plain, overlap, bf16 gradients": [*OVERLAP, *BF16],
    "auto, overlap, bf16 gradients": [*CIERA, *OVERLAP, *BF16],
    "ER": [*REUSE, "--ciera-no-selection", "--ciera-no-overlap"],
    "ER +BSC": [*REUSE, "--ciera-no-overlap"],
    "ER +BSC +CCP": REUSE,
}


def parity(options, folder: Path) -> dict:
    """Stock twice, then --ciera in several ways, all runs side by side."""
    count = ["--train-iters", str(options.parity_iterations)]
    one, many = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    runs = {
        "stock": ([], one),
        "stock again": ([], many),
        "ciera": (CIERA, one),
        "ciera, overlap, 1 connection": ([*CIERA, "--ciera-no-selection", *OVERLAP], one),
        "ciera, overlap, 8 connections": (
            [*CIERA, "--ciera-no-selection", "--ciera-verify-interval", "50", *OVERLAP],
            many,
        ),
        "exponent reuse": ([*REUSE, "--ciera-no-selection", "--ciera-no-overlap"], one),
    }

    def start(item):
        name, (flags, environment) = item
        place = folder / name.replace(" ", "_").replace(",", "")
        return train(
            place, options.gpus, [*LOCAL, *SMALL, *count, *flags], environment, options.parity_timeout
        )

    with ThreadPoolExecutor(len(runs)) as pool:
        results = dict(zip(runs, pool.map(start, runs.items()), strict=True))
    for name, result in results.items():
        place = folder / name.replace(" ", "_").replace(",", "")
        if result["exit"] == 0 and name != "stock" and results["stock"]["exit"] == 0:
            result["against stock"] = compare(folder / "stock", place).as_dict()
        result["seconds"] = statistics.median(result["seconds"]) if result["seconds"] else None
        del result["timers"]
    return results


def bench(options, folder: Path) -> dict:
    """The gather alone, per link, on real deltas and on thinned ones."""
    results = {}
    for name, same in (("as they are", []), ("78 % unchanged", ["--same", "0.78"])):
        command = [sys.executable, str(SCRIPTS / "bench_param_gather.py"), "--json"]
        command += ["--gpus", str(options.gpus), "--repeats", str(options.repeats), *same]
        command += ["--num-values", str(options.num_values), "--links", *options.links]
        command += ["--modes", *options.modes] if options.modes else []
        command += ["--weights", *options.weights]
        process = subprocess.run(command, capture_output=True, text=True)
        (folder / f"bench_{len(same)}.log").write_text(process.stderr)
        results[name] = json.loads(process.stdout) if process.returncode == 0 else process.stderr[-3000:]
    return results


def steps(options, folder: Path) -> dict:
    """Iteration times, medians after the warm-up, and memory."""
    wanted = options.only or STEPS
    plans = [
        (link, name)
        for link in options.links
        for name in wanted
        if options.only or name in BASIC or link == options.links[-1]
    ]
    results: dict = {}
    for link, name in plans:
        if time.time() > options.deadline:
            results.setdefault(link, {})[name] = {"exit": "not run: out of time"}
            continue
        place = folder / f"{link}_{name}".replace(" ", "_").replace(",", "")
        count = ["--train-iters", str(options.step_iterations)]
        size = ["--num-layers", str(options.step_layers)]
        flags = [*LOCAL, *MODEL, *size, *count, *STEPS[name]]
        found = train(place, options.gpus, flags, LINKS[link], 150)
        seconds = found["seconds"][options.step_iterations // 2 :]
        found["seconds"] = statistics.median(seconds) if seconds else None
        results.setdefault(link, {})[name] = found
    for runs in results.values():
        _add_extra_memory(runs)
    return results


def _add_extra_memory(runs: dict) -> None:
    """To each run with --ciera, `extra_bytes`: its peak over that of the same run without; `stated_bytes`: states and
    staging as it reports them."""
    for name, found in runs.items():
        plain = runs.get(name.replace("auto", "plain") if "auto" in name else "plain", {})
        metrics = found.get("metrics", {})
        if "ciera/state_mb" in metrics and found.get("peak_bytes") and plain.get("peak_bytes"):
            found["extra_bytes"] = found["peak_bytes"] - plain["peak_bytes"]
            found["stated_bytes"] = 2**20 * (metrics["ciera/state_mb"] + metrics["ciera/staging_mb"])


def table(report: dict) -> list[str]:
    lines = []
    for name, found in report.get("parity", {}).items():
        verdict = found.get("against stock", {})
        shown = "equal" if verdict.get("equal") else verdict.get("first_difference", "reference")
        lines.append(f"parity  {name:<32} exit {found['exit']}  {found['seconds']} s/it  {shown}")
    for deltas, links in report.get("bench", {}).items():
        if isinstance(links, str):
            lines.append(f"bench   {deltas}: FAILED {links[-600:]}")
            continue
        for link, found in links.items():
            for mode, m in found["modes"].items():
                shown = m.get("unavailable") or (
                    f"{m['speedup']:5.2f}x  {m['milliseconds']:8.3f} of {m['raw_milliseconds']:8.3f} ms  "
                    f"ratio {m['ratio']:.3f} enc {m.get('encode_ms', 0):.2f} dec {m.get('decode_ms', 0):.2f} "
                    f"{'+'.join(m['codecs']) or 'raw'} pieces {m['pieces']} waves {m['exchanges']:.1f} "
                    f"extra {_mb(m['extra_bytes'])} of stated {_mb(m['stated_bytes'])} MB"
                )
                lines.append(
                    f"bench   {deltas:<15} {link:<7} {found['bus_gb_s'] or 0:6.1f} GB/s {mode:<35} {shown}"
                )
    for link, runs in report.get("steps", {}).items():
        for name, found in runs.items():
            times = found.get("timers", {})
            lines.append(
                f"steps   {link:<7} {name:<24} exit {found['exit']}  {found.get('seconds')} s  gather "
                f"{times.get('params-all-gather')} grads {times.get('all-grads-sync')} ms "
                f"ratio {found.get('metrics', {}).get('ciera/ratio', '-')} peak {_mb(found.get('peak_bytes'))} "
                f"extra {_mb(found.get('extra_bytes'))} of stated {_mb(found.get('stated_bytes'))} MB"
            )
    return lines


def _mb(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 2**20:.0f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", required=True)
    parser.add_argument("--output", type=output_folder, required=True)
    parser.add_argument("--stages", nargs="+", default=["parity", "bench", "steps"])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--parity-iterations", type=int, default=500)
    parser.add_argument("--parity-timeout", type=int, default=240)
    parser.add_argument("--step-iterations", type=int, default=14)
    parser.add_argument("--step-layers", type=int, default=8)
    parser.add_argument(
        "--only", nargs="+", choices=STEPS, default=None, help="of the runs of `steps`, these"
    )
    parser.add_argument("--modes", nargs="+", default=None, help="of the benchmark's modes, these")
    parser.add_argument("--num-values", type=int, default=1 << 28)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60, help="start no training run after so long")
    options = parser.parse_args(argv)
    options.deadline = time.time() + 60 * options.minutes
    options.output.mkdir(parents=True, exist_ok=True)
    scratch = options.output / "runs"
    scratch.mkdir(exist_ok=True)
    report: dict = {}
    for stage in options.stages:
        begin = time.time()
        report[stage] = {"parity": parity, "bench": bench, "steps": steps}[stage](options, scratch)
        print(f"{stage}: {time.time() - begin:.0f} s", flush=True)
        (options.output / "report.json").write_text(json.dumps(report, indent=1))
    print("\n".join(table(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
