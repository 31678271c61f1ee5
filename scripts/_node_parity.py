"""Stage `parity` of measure_node.py: training of a small model in several layouts, bit for bit."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from _runs import LOCAL, slug, train

from megatron_ciera.comparison import compare
from placement.file import DECODER, LayerId, LayerPlacement, Placement

CIERA = "--ciera --ciera-warmup-iters 4".split()
CODED = [*CIERA, "--ciera-no-selection"]
PLACED = "--correlated-placement --placement-fit-iteration 2".split()
RANDOM = "--correlated-placement --placement-file {placement}".split()
SHUFFLED = [*PLACED, "--token-shuffle"]

# Layout of the parity model: flags for N processes, and runs in it: flags, what to compare with, what must be equal.
# With experts moved the norm adds them in another order, and a rank holds others: then only losses are compared.
PARITY = {
    "DP = N": (
        "",
        {
            "stock": ([], None, None),
            "ciera": (CODED, "stock", "all"),
            "ciera, overlap": (
                [*CODED, "--overlap-grad-reduce", "--overlap-param-gather", "--ciera-verify-interval", "10"],
                "stock",
                "all",
            ),
        },
    ),
    "EP = N": (
        "--expert-model-parallel-size {n} --clip-grad 0",
        {
            "stock": ([], None, None),
            "dedup + ciera": (["--dedup-dispatch", *CODED], "stock", "all"),
            "random placement": (RANDOM, "stock", "losses"),
        },
    ),
    "EP = N/2, expert DP 2": (
        "--expert-model-parallel-size {half} --clip-grad 0",
        {
            "stock": ([], None, None),
            "random placement": (RANDOM, "stock", "losses"),
            "random placement + ciera": ([*RANDOM, *CODED], "random placement", "all"),
        },
    ),
    "TP = EP = N": (
        "--tensor-model-parallel-size {n} --sequence-parallel --expert-model-parallel-size {n} "
        "--expert-tensor-parallel-size 1 --clip-grad 0",
        {
            "stock": ([], None, None),
            "dedup": (["--dedup-dispatch"], "stock", "all"),
            "shuffle": (SHUFFLED, None, None),
            "shuffle + ciera": ([*SHUFFLED, *CODED], "shuffle", "all"),
        },
    ),
}
SMALL = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --num-experts 16 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 256 --seq-length 256 --max-position-embeddings 256 --vocab-size 1023 "
    "--micro-batch-size 2 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 1000 --deterministic-mode"
).split()
SIZES = ("--num-layers", "--num-experts", "--moe-router-topk")


def parity(options, folder: Path) -> list[dict]:
    """Runs of one layout side by side; a line each."""
    size = {"n": options.gpus, "half": options.gpus // 2}
    files = {count: random_placement(folder, count) for count in size.values()}
    lines = []
    for layout, (words, runs) in PARITY.items():
        if options.gpus < 4 and "N/2" in layout:
            continue
        common = [*LOCAL, *SMALL, *words.format(**size).split(), "--global-batch-size", str(2 * options.gpus)]
        common += ["--train-iters", str(options.parity_iterations)]
        places = {name: folder / slug(f"parity {layout} {name}") for name in runs}

        placement = files[size["half" if "half" in words else "n"]]

        def start(name, runs=runs, common=common, places=places, placement=placement):
            environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"}
            flags = [*common, *(word.format(placement=placement) for word in runs[name][0])]
            return train(places[name], options.gpus, flags, environment, options.limit)

        with ThreadPoolExecutor(options.side_by_side) as pool:
            found = dict(zip(runs, pool.map(start, runs), strict=True))
        for name, (_, reference, wanted) in runs.items():
            line = {"layout": layout, "run": name, "exit": found[name]["exit"], "against": reference}
            line["passed"] = line["exit"] == 0 and (not reference or found[reference]["exit"] == 0)
            if reference and line["passed"]:
                difference = compare(places[reference], places[name])
                line |= difference.as_dict() | {"wanted": wanted}
                line["passed"] = difference.equal if wanted == "all" else difference.loss_max_abs_diff == 0.0
                # NaN equals NaN there: two runs that diverged show nothing.
                line["passed"] &= all(map(math.isfinite, found[name]["losses"].values()))
            lines.append(line)
            print(f"parity  {layout}: {name}: {'passed' if line['passed'] else 'FAILED'}", flush=True)
    return lines


def random_placement(folder: Path, expert_parallel: int) -> Path:
    """A placement of the parity model's experts that a fit would not find, so that experts move for certain."""
    layers, experts, topk = (int(SMALL[SMALL.index(name) + 1]) for name in SIZES)
    rng = np.random.default_rng(expert_parallel)
    maps = tuple(LayerPlacement(LayerId(DECODER, layer), rng.permutation(experts)) for layer in range(layers))
    fit = {"tokens": 0, "source": "random", "iteration": 0}
    path = folder / f"placement_{expert_parallel}.json"
    Placement(experts, topk, expert_parallel, expert_parallel, maps, fit).save(path)
    return path
