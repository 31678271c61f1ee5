"""Fits a placement in a process of its own: python -m megatron_ciera.moe.fit_process < tokens.npz > result.json

Imports no Megatron.
"""

import json
import subprocess
from dataclasses import asdict, dataclass

import numpy as np

from megatron_ciera import background
from placement.file import LayerId
from placement.fit import NoGainError, fit
from placement.rows import contiguous_expert_to_rank, count_rows


@dataclass(frozen=True)
class FitRequest:
    """What a fit needs besides tokens. `maps`: the placement in force, [layers][E].

    for_shuffling: whether tables for token shuffling will be fitted for the placement.
    """

    layer_ids: list[list]
    maps: list[list[int]]
    num_experts: int
    expert_parallel_size: int
    ranks_per_node: int
    load_tolerance: float
    for_shuffling: bool = False


@dataclass(frozen=True)
class FitAnswer:
    """maps: [layers][E], fitted. rows_before, rows_after: rows per token on held-out tokens, [layers].

    failure: why there is nothing to apply, or None. num_tokens: fitted on, fewer than asked for in a small batch.
    """

    maps: list[list[int]]
    rows_before: list[float]
    rows_after: list[float]
    failure: str | None = None
    num_tokens: int = 0


def solve(tokens: np.ndarray, held_out: np.ndarray, request: FitRequest) -> FitAnswer:
    """Fits on `tokens` and counts rows of old and new placement on `held_out`, [layers, tokens, topk] each."""
    try:
        placement = fit(
            tokens,
            request.expert_parallel_size,
            request.ranks_per_node,
            request.load_tolerance,
            num_experts=request.num_experts,
            layer_ids=[LayerId(*parts) for parts in request.layer_ids],
            for_shuffling=request.for_shuffling,
        )
    except NoGainError as error:
        return FitAnswer([], [], [], f"{error}. --placement-fit-tokens sets their number")
    new = [layer.physical_to_logical_map for layer in placement.layers]
    return FitAnswer(
        maps=[map_.tolist() for map_ in new],
        rows_before=_rows(held_out, request.maps, request),
        rows_after=_rows(held_out, new, request),
        num_tokens=tokens.shape[1],
    )


def start(tokens: np.ndarray, held_out: np.ndarray, request: FitRequest) -> subprocess.Popen:
    """Starts the fit and returns at once; `answer_of` waits for it."""
    return background.start(
        "megatron_ciera.moe.fit_process",
        tokens=tokens,
        held_out=held_out,
        request=json.dumps(asdict(request)),
    )


def answer_of(process: subprocess.Popen) -> FitAnswer:
    """Waits for a started fit. A fit that broke, or printed something else, is an answer with `failure`."""
    try:
        return FitAnswer(**json.loads(background.output_of(process)))
    except (background.FitFailedError, ValueError, TypeError) as error:
        return FitAnswer([], [], [], str(error))


def _rows(tokens, maps, request: FitRequest) -> list[float]:
    ranks = contiguous_expert_to_rank(request.num_experts, request.expert_parallel_size)
    counts = []
    for experts, map_ in zip(tokens, maps, strict=True):
        expert_to_rank = np.empty(request.num_experts, dtype=np.int64)
        expert_to_rank[np.asarray(map_)] = ranks
        counts.append(count_rows(experts, expert_to_rank) / max(1, len(experts)))
    return counts


def main() -> None:
    with background.read_arrays() as given:
        request = FitRequest(**json.loads(str(given["request"])))
        answer = solve(given["tokens"], given["held_out"], request)
    print(json.dumps(asdict(answer)))


if __name__ == "__main__":
    main()
