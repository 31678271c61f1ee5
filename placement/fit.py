"""From routing to a placement: search, hold-out choice per layer, refusal when nothing is gained.

A layer keeps its contiguous placement unless placements fitted on one half of the tokens beat it on the
other half by two standard errors. When no layer gains beyond what chance would give among so many layers,
there is nothing to place by and `NoGainError` is raised. Where the placement is to serve token shuffling as
well, all layers are fitted for predictability, too, if that sends fewer rows on held-out halves.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from scipy.special import ndtri
from threadpoolctl import threadpool_limits

from placement.file import DECODER, LayerId, LayerPlacement, Placement
from placement.layer_fit import fit_layer, to_physical_map, uses_evidence
from placement.prediction import rows_when_shuffled, window_of
from placement.rows import contiguous_expert_to_rank, rank_load, ranks_per_token, rows_removed

USUAL_TOKENS = 4096
_CHANCE = 1e-3
_STANDARD_ERRORS = 2.0
_BLOCK_TOKENS = 64
_LAYERS_ASKED = 12
_SELECTIONS_OF_AN_EXPERT = 8


class NoGainError(ValueError):
    """No layer sends fewer rows than contiguous placement beyond chance."""


@dataclass(frozen=True)
class LayerResult:
    """One fitted layer, measured on the fit tokens. `held_out_gain`: rows removed per assignment, and
    `held_out_sigmas`: that gain in standard errors, both of placements fitted on the other half."""

    layer_id: LayerId
    expert_to_rank: np.ndarray
    rows_removed_contiguous: float
    rows_removed: float
    rank_load_contiguous: float
    rank_load: float
    changed: bool
    held_out_gain: float
    held_out_sigmas: float


@dataclass(frozen=True)
class FitResult:
    """A placement and how it was chosen."""

    placement: Placement
    layers: tuple[LayerResult, ...]


def fit(
    top_indices: np.ndarray,
    expert_parallel_size: int,
    ranks_per_node: int | None = None,
    load_tolerance: float = 0.05,
    seed: int = 0,
    *,
    num_experts: int | None = None,
    layer_ids=None,
    num_workers: int = 1,
    fit_info: dict | None = None,
    for_shuffling: bool = False,
) -> Placement:
    """Fits a placement to `top_indices` ([layers, tokens, topk] integer experts). See `fit_layers`."""
    result = fit_layers(
        top_indices,
        expert_parallel_size,
        ranks_per_node,
        load_tolerance,
        seed,
        num_experts=num_experts,
        layer_ids=layer_ids,
        num_workers=num_workers,
        fit_info=fit_info,
        for_shuffling=for_shuffling,
    )
    return result.placement


def fit_layers(
    top_indices: np.ndarray,
    expert_parallel_size: int,
    ranks_per_node: int | None = None,
    load_tolerance: float = 0.05,
    seed: int = 0,
    *,
    num_experts: int | None = None,
    layer_ids=None,
    num_workers: int = 1,
    fit_info: dict | None = None,
    source_layers: str | None = None,
    progress=None,
    for_shuffling: bool = False,
) -> FitResult:
    """Fits every layer and measures it on the fit tokens.

    `load_tolerance`: how much a layer's max/mean rank load may rise over contiguous (absolute; inf: any).
    `layer_ids`: LayerId of each row, default decoder layers 0, 1, ...; `num_workers`: processes (forked; keep
    1 inside a training job). `progress(done, total)` is called after each layer. `for_shuffling`: group for
    predictability as well where that pays (`_evidence_pays`; top-2 of more than 32 experts only). Same input
    and seed, same placement. Raises ValueError for input that cannot be fitted, NoGainError when no layer gains.
    """
    top_indices = np.asarray(top_indices)
    if top_indices.ndim != 3:
        raise ValueError(f"top_indices has shape {list(top_indices.shape)}, wanted [layers, tokens, topk]")
    num_layers, num_tokens, topk = top_indices.shape
    if layer_ids is None:
        layer_ids = [LayerId(DECODER, layer) for layer in range(num_layers)]
    if num_experts is None:
        num_experts = infer_num_experts(top_indices)
    ranks_per_node = ranks_per_node or expert_parallel_size
    check_shape(num_experts, topk, expert_parallel_size, ranks_per_node)
    check_experts(top_indices, num_experts, layer_ids)
    sizes = (num_experts, expert_parallel_size, ranks_per_node, load_tolerance, seed)
    jobs = [(top_indices[index : index + 1], layer_id, *sizes) for index, layer_id in enumerate(layer_ids)]
    if for_shuffling and uses_evidence(num_experts, topk):
        windows = [window_of(top_indices, index, layer_id) for index, layer_id in enumerate(layer_ids)]
        looking_back = [job if w is None else (w, *job[1:]) for w, job in zip(windows, jobs, strict=True)]
        jobs = looking_back if _evidence_pays(looking_back, num_workers) else jobs
    layers = tuple(_run(_fit_one, jobs, num_workers, progress))
    _refuse_chance(layers, num_tokens)
    placement = Placement(
        num_experts=num_experts,
        topk=topk,
        expert_parallel_size=expert_parallel_size,
        ranks_per_node=ranks_per_node,
        layers=tuple(
            LayerPlacement(
                layer.layer_id, to_physical_map(layer.expert_to_rank, num_experts // expert_parallel_size)
            )
            for layer in layers
        ),
        fit={"tokens": num_tokens, "source": None, "iteration": None, **(fit_info or {})},
        source_layers=source_layers,
    )
    placement.validate()
    return FitResult(placement, layers)


def infer_num_experts(top_indices: np.ndarray) -> int:
    """Largest expert id + 1, refused when most ids below it never occur (then ids are likely wrong)."""
    if not top_indices.size:
        raise ValueError("the trace is empty: no tokens to fit from; record one with more training steps")
    num_experts = int(top_indices.max()) + 1
    if int(top_indices.min()) >= 0 and num_experts > 4 * top_indices.shape[-1]:
        seen = len(np.unique(top_indices))
        if 2 * seen < num_experts and top_indices.size < _SELECTIONS_OF_AN_EXPERT * seen:
            raise ValueError(
                f"{top_indices.shape[1]} tokens select only {seen} different experts, the largest id is "
                f"{num_experts - 1}: too few tokens to tell the number of experts by, let alone to fit from; give "
                f"more (--num-tokens, by default {USUAL_TOKENS})"
            )
        if 2 * seen < num_experts:
            raise ValueError(
                f"the largest expert id is {num_experts - 1} but only {seen} different experts are ever "
                f"selected: ids may be out of range; give --num-experts if the model has {num_experts} or "
                "more"
            )
    return num_experts


def check_shape(num_experts: int, topk: int, expert_parallel_size: int, ranks_per_node: int) -> None:
    """Raises ValueError for sizes that no placement can have."""
    if expert_parallel_size < 2:
        raise ValueError(
            f"--expert-parallel-size is {expert_parallel_size}: with one rank there is nothing to place; "
            "give the expert-model-parallel size of the training run, 2 or more"
        )
    if topk < 2:
        raise ValueError(
            f"the trace has topk = {topk}: a token selects one expert, so no two experts are selected "
            "together and placement cannot remove a row; use a model with topk >= 2"
        )
    if num_experts % expert_parallel_size:
        raise ValueError(
            f"{num_experts} experts are not divisible by --expert-parallel-size {expert_parallel_size}; give "
            "the size of the training run, or --num-experts when the trace does not show the last experts"
        )
    if expert_parallel_size % ranks_per_node:
        raise ValueError(
            f"--expert-parallel-size {expert_parallel_size} is not a multiple of --ranks-per-node "
            f"{ranks_per_node}; give the number of expert-parallel ranks that share a node"
        )


def check_experts(top_indices: np.ndarray, num_experts: int, layer_ids) -> None:
    """Raises ValueError, naming layer and token, for ids out of range or twice in one token."""
    for index, layer_id in enumerate(layer_ids):
        experts = top_indices[index]
        if not experts.size:
            raise ValueError(f"{layer_id}: no tokens; record a longer trace")
        bad = np.argwhere((experts < 0) | (experts >= num_experts))
        if len(bad):
            token, column = bad[0]
            raise ValueError(
                f"{layer_id}, token {token}: expert id {int(experts[token, column])} is out of range "
                f"0..{num_experts - 1}; check that trace, --array and --num-experts belong to this model"
            )
        ordered = np.sort(experts, axis=1)
        twice = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
        if len(twice):
            token, column = twice[0]
            raise ValueError(
                f"{layer_id}, token {token}: expert {int(ordered[token, column])} is selected twice; a router "
                "selects distinct experts, so the trace is damaged or holds something else"
            )


def _run(function, jobs, num_workers: int, progress=None):
    results = []
    if num_workers <= 1 or len(jobs) == 1:
        for job in jobs:
            results.append(function(job))
            if progress:
                progress(len(results), len(jobs))
        return results
    with ProcessPoolExecutor(min(num_workers, len(jobs)), mp_context=get_context("fork")) as pool:
        for result in pool.map(function, jobs):
            results.append(result)
            if progress:
                progress(len(results), len(jobs))
    return results


def _fit_one(job) -> LayerResult:
    """Fits the last layer of a window of [layers, tokens, topk]; layers before it are evidence."""
    window, layer_id, num_experts, expert_parallel_size, ranks_per_node, tolerance, seed = job
    top_indices, evidence = window[-1], window[:-1]
    contiguous = contiguous_expert_to_rank(num_experts, expert_parallel_size)

    def run(part, num_starts=1):
        sizes = (num_experts, expert_parallel_size, ranks_per_node)
        seen = evidence[:, part] if len(evidence) else None
        return fit_layer(top_indices[part], *sizes, tolerance, seed, num_starts, seen)

    # Matrices are small: several BLAS threads would cost far more than they save.
    with threadpool_limits(1, "blas"):
        gain, sigmas = _held_out_gain(top_indices, contiguous, run)
        fitted = run(slice(None), None) if sigmas > _STANDARD_ERRORS else contiguous
    return LayerResult(
        layer_id=layer_id,
        expert_to_rank=fitted,
        rows_removed_contiguous=rows_removed(top_indices, contiguous),
        rows_removed=rows_removed(top_indices, fitted),
        rank_load_contiguous=rank_load(top_indices, contiguous, expert_parallel_size),
        rank_load=rank_load(top_indices, fitted, expert_parallel_size),
        changed=bool((fitted != contiguous).any()),
        held_out_gain=gain,
        held_out_sigmas=sigmas,
    )


def _evidence_pays(jobs, num_workers: int) -> bool:
    """Whether fits that look at the layers before send fewer rows, summed over the layers that have some.

    Asked of twelve of them at most, spread evenly. Counted on the halves of the tokens that the fit has not
    seen, with tokens moved to owners predicted from the other half.
    """
    jobs = [job for job in jobs if len(job[0]) > 1]
    if not jobs or jobs[0][0].shape[1] < 4:
        return False
    jobs = jobs[:: -(-len(jobs) // _LAYERS_ASKED)]
    without, with_evidence = np.sum(_run(_shuffled_rows, jobs, num_workers), axis=0)
    return bool(with_evidence < without)


def _shuffled_rows(job) -> tuple[int, int]:
    """Held-out rows of one layer when shuffled, fitted (without, with) the layers before as evidence."""
    window, _, num_experts, expert_parallel_size, ranks_per_node, tolerance, seed = job
    sizes = (num_experts, expert_parallel_size)
    rows = [0, 0]
    with threadpool_limits(1, "blas"):
        for fit_part, other in _halves(window.shape[1]):
            seen, unseen = window[:, fit_part], window[:, other]
            for index, evidence in enumerate((None, seen[:-1])):
                fitted = fit_layer(seen[-1], *sizes, ranks_per_node, tolerance, seed, 1, evidence)
                rows[index] += rows_when_shuffled(seen, unseen, fitted, *sizes)
    return tuple(rows)


def _halves(num_tokens: int) -> tuple[tuple[slice, slice], ...]:
    """(to fit on, held out), either way round."""
    first, second = slice(None, num_tokens // 2), slice(num_tokens // 2, None)
    return (first, second), (second, first)


def _held_out_gain(top_indices: np.ndarray, contiguous: np.ndarray, run) -> tuple[float, float]:
    """Gain over contiguous of fits to one half, on the other half: (rows per assignment, standard errors).

    The standard error is taken over blocks of consecutive tokens, which share their text.
    """
    half = len(top_indices) // 2
    if half < 2:
        return 0.0, 0.0
    blocks = []
    for fit_part, other in _halves(len(top_indices)):
        fitted = run(fit_part)
        tokens = top_indices[other]
        saved = ranks_per_token(tokens, contiguous) - ranks_per_token(tokens, fitted)
        size = max(1, min(_BLOCK_TOKENS, half // 8))
        blocks += [saved[start : start + size].mean() for start in range(0, len(saved) - size + 1, size)]
    blocks = np.asarray(blocks)
    error = blocks.std(ddof=1) / np.sqrt(len(blocks)) if len(blocks) > 1 else np.inf
    gain = float(blocks.mean())
    return gain / top_indices.shape[1], gain / error if error > 0 else 0.0 if gain <= 0 else np.inf


def _refuse_chance(layers, num_tokens: int) -> None:
    sigmas = np.asarray([min(layer.held_out_sigmas, 1e6) for layer in layers])
    best_wanted = -ndtri(_CHANCE / len(sigmas))
    together = float(sigmas.sum() / np.sqrt(len(sigmas)))
    if any(layer.changed for layer in layers) and (sigmas.max() > best_wanted or together > -ndtri(_CHANCE)):
        return
    raise NoGainError(
        f"no layer gains beyond chance from {num_tokens} tokens: on held-out tokens the best of {len(layers)} "
        f"layers gains {sigmas.max():.1f} standard errors, wanted more than {best_wanted:.1f}. Tokens are too few, "
        "or experts are selected together as often as independent routing would: routing is forced to be balanced "
        "(--moe-router-force-load-balancing), data are mocked (--mock-data), or training is at its very beginning"
    )
