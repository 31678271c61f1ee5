"""Times the compressed parameter gather against the plain one, on several emulated links of one host.

    scripts/bench_param_gather.py --weights STEP1.npz STEP2.npz … [--links nvlink shm socket] [--same 0.78] [--json]

Weights are consecutive snapshots of one model (bf16 bits as uint16), tiled to --num-values. Every mode must gather
the right bits before it is timed; a mode that does not ends the script. Times include encode, sizes, wire and decode.
--same S thins the changes at random until a share S of the values keeps its bits, as at low learning rates.
"""

import _path  # noqa: F401, I001
import argparse
import json
import os
import subprocess
import sys

from _runs import LINKS, result_of, search_path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", nargs="+", required=True, help="two or more .npz, in order of steps")
    parser.add_argument("--same", type=float, default=None, help="share of values that keep their bits")
    parser.add_argument("--gpus", type=int, default=2, help="processes on this host")
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--num-values", type=int, default=1 << 28, help="parameters in the buckets")
    parser.add_argument("--num-buckets", type=int, default=1)
    parser.add_argument("--coder", default="auto", choices=("auto", "ans", "packed"))
    parser.add_argument("--modes", nargs="+", default=None)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    if len(options.weights) < 2:
        parser.error("--weights: give at least two consecutive snapshots")
    report = {link: _run(link, options) for link in options.links}
    if any(found is None for found in report.values()):
        return 1
    if options.json:
        print(json.dumps(report))
    else:
        for link, found in report.items():
            _print(link, found)
    return 0


def _run(link: str, options) -> dict | None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.gpus), "-m", "megatron_ciera.param_gather.bench"]
    for name in ("num_values", "num_buckets", "coder", "repeats"):
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    if options.same is not None:
        command += ["--same", str(options.same)]
    if options.modes:
        command += ["--modes", *options.modes]
    command += ["--weights", *options.weights]
    environment = os.environ | LINKS[link] | {"PYTHONPATH": search_path(), "NCCL_NVLS_ENABLE": "0"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = result_of(process.stdout)
    if found is None:
        print(f"{link}: no result\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}", file=sys.stderr)
    return found


def _print(link: str, found: dict) -> None:
    same = ", ".join(f"{share:.1%}" for share in found["same_values"])
    print(
        f"{link}: {found['gpus']} × {found['device']}, {found['values']} values in {found['buckets']} buckets, "
        f"{same} of the values unchanged"
    )
    if found["bus_gb_s"]:
        print(f"  plain gather: {found['bus_gb_s']:.1f} GB/s bus bandwidth")
    for mode, values in found["modes"].items():
        if "unavailable" in values:
            print(f"  {mode:<36} not available: {values['unavailable']}")
            continue
        print(
            f"  {mode:<36} {values['milliseconds']:9.3f} ms  raw {values['raw_milliseconds']:9.3f} ms  "
            f"{values['speedup']:5.2f}x  ratio {values['ratio']:.3f}  {', '.join(values['codecs']) or 'raw'}"
        )


if __name__ == "__main__":
    sys.exit(main())
