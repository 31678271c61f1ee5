"""Evaluates a placement on a stream of tokens: rows removed, rank load, locality, against contiguous."""

import numpy as np

from placement.file import LayerId, Placement
from placement.fit import check_experts
from placement.prediction import LocalityCounter
from placement.rows import RowCounter, contiguous_expert_to_rank, load_ratio

KEYS = (
    "rows_removed_contiguous",
    "rows_removed",
    "rank_load_contiguous",
    "rank_load",
    "locality_contiguous",
    "locality",
)


def layers_in_trace(placement: Placement, layer_ids, source_layers: str | None) -> list[int]:
    """For each stored layer of the placement, the row of the trace that shows it.

    Raises ValueError naming the layer that the trace or the placement lacks.
    """
    name = f"placement file {placement.path}" if placement.path else "placement"
    if "moe_order" in (placement.source_layers, source_layers):
        if len(placement.layers) != len(layer_ids):
            raise ValueError(
                f"{name}: {len(placement.layers)} layers, the trace has {len(layer_ids)}; evaluate on a trace "
                "of the same model"
            )
        return list(range(len(layer_ids)))
    rows = {layer_id: row for row, layer_id in enumerate(layer_ids)}
    stored = [layer.layer_id for layer in placement.layers]
    for layer_id in stored:
        if layer_id not in rows:
            raise ValueError(f"{name}: {layer_id} is not in the trace; evaluate on a trace of the same model")
    for layer_id in rows:
        if layer_id not in stored:
            raise ValueError(f"{name}: {layer_id} of the trace is missing; fit again from a whole trace")
    return [rows[layer_id] for layer_id in stored]


def evaluate(placement: Placement, blocks, rows: list[int], tables=None) -> dict:
    """Counts a placement over [layers, tokens, topk] blocks. Returns the object of `--json`.

    `rows`: from `layers_in_trace`; `tables`: from `load_tables`. Shares are fractions; top-level values are
    means over the layers that have them. Locality is null without prediction tables and for the first two
    layers.
    """
    contiguous = contiguous_expert_to_rank(placement.num_experts, placement.expert_parallel_size)
    ranks = [placement.expert_to_rank(index) for index in range(len(placement.layers))]
    size = placement.expert_parallel_size
    before = [RowCounter(contiguous, size) for _ in ranks]
    after = [RowCounter(rank, size) for rank in ranks]
    layer_ids = [layer.layer_id for layer in placement.layers]
    counter = LocalityCounter(placement, tables) if tables else None
    for block in blocks:
        block = block[rows]
        _check_block(placement, block, layer_ids)
        for index, experts in enumerate(block):
            before[index].add(experts)
            after[index].add(experts)
        if counter:
            counter.add(block)
    localities = counter.results() if counter else [None] * len(ranks)
    layers = [_layer_entry(*values) for values in zip(layer_ids, before, after, localities, strict=True)]
    return {**{key: _mean(layers, key) for key in KEYS}, "layers": layers}


def evaluate_loads(placement: Placement, loads: np.ndarray) -> dict:
    """Rank load of a placement from [layers, num_experts] loads. The object of `--json`; the rest is null.

    Layers without any load (dense ones) are left out when that makes the number of layers fit. Raises
    ValueError when the loads are of another model.
    """
    found = list(loads.shape)
    if len(loads) != len(placement.layers):
        loads = loads[loads.sum(axis=1) > 0]
    wanted = (len(placement.layers), placement.num_experts)
    if loads.shape != wanted:
        raise ValueError(
            f"loads have shape {found} ({len(loads)} layers with load), the placement is of "
            f"{list(wanted)} [layers, experts]; give loads of the same model"
        )
    size = placement.expert_parallel_size
    contiguous = contiguous_expert_to_rank(placement.num_experts, size)
    layers = []
    for index, (layer, load) in enumerate(zip(placement.layers, loads, strict=True)):
        ratios = [
            load_ratio(np.bincount(ranks, weights=load, minlength=size))
            for ranks in (contiguous, placement.expert_to_rank(index))
        ]
        entry = _names(layer.layer_id) | dict.fromkeys(KEYS)
        layers.append(entry | {"rank_load_contiguous": ratios[0], "rank_load": ratios[1]})
    return {**{key: _mean(layers, key) for key in KEYS}, "layers": layers}


def _names(layer_id: LayerId) -> dict:
    block = {"block": layer_id.block} if layer_id.block != "decoder" else {}
    return {"layer": layer_id.layer, **block}


def _layer_entry(layer_id: LayerId, before: RowCounter, after: RowCounter, locality) -> dict:
    return {
        **_names(layer_id),
        "rows_removed_contiguous": before.rows_removed,
        "rows_removed": after.rows_removed,
        "rank_load_contiguous": before.rank_load,
        "rank_load": after.rank_load,
        "locality_contiguous": None if locality is None else float(locality[0]),
        "locality": None if locality is None else float(locality[1]),
    }


def _check_block(placement: Placement, block: np.ndarray, layer_ids) -> None:
    if block.shape[2] != placement.topk:
        raise ValueError(
            f"the trace has topk {block.shape[2]}, the placement {placement.topk}; evaluate on the same model"
        )
    check_experts(block, placement.num_experts, layer_ids)


def _mean(layers, key: str) -> float | None:
    values = [layer[key] for layer in layers if layer[key] is not None]
    return float(np.mean(values)) if values else None
