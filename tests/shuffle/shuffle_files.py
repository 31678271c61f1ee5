"""Placement files with prediction tables for tests."""

from pathlib import Path

import numpy as np

from placement.file import DECODER, LayerId, LayerPlacement, Placement
from placement.prediction import LayerTables
from placement.table_file import save_tables


def random_tables(num_experts: int, num_ranks: int, seed: int, beats_chance: bool = True) -> LayerTables:
    """Tables that predict nothing, but move nearly every token."""
    rng = np.random.default_rng(seed)
    previous, before = (rng.random((num_experts, num_ranks), dtype=np.float32) for _ in range(2))
    keys = np.sort(rng.choice(num_experts**2, size=num_experts, replace=False))
    pairs = rng.random((num_experts, num_ranks), dtype=np.float32)
    chance = np.full(num_ranks, 1 / num_ranks, dtype=np.float32)
    return LayerTables(previous, before, keys, pairs, chance, *((1.0, 0.0) if beats_chance else (0.5, 0.5)))


def write_placement(
    path: Path, layers: int, num_ranks: int, num_experts: int = 8, tables: bool = True, **options
):
    """A random placement at `path` and, if asked, random tables for all layers but the first two beside it."""
    rng = np.random.default_rng(0)
    placed = tuple(LayerPlacement(LayerId(DECODER, i), rng.permutation(num_experts)) for i in range(layers))
    fit = {"tokens": 64, "source": "test", "iteration": 1}
    placement = Placement(num_experts, 2, num_ranks, num_ranks, placed, fit)
    placement.save(path)
    if tables:
        made = [random_tables(num_experts, num_ranks, i, **options) if i > 1 else None for i in range(layers)]
        save_tables(Path(path).with_suffix(".npz"), made, placement)
    return path
