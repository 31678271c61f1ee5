"""Correlated expert placement: an offline library (numpy, scipy) that needs neither Megatron nor a GPU."""

from placement.file import LayerId, LayerPlacement, Placement, load_placement
from placement.fit import FitResult, NoGainError, fit, fit_layers
from placement.rows import count_rows, rank_load, rows_removed

__all__ = [
    "FitResult",
    "LayerId",
    "LayerPlacement",
    "NoGainError",
    "Placement",
    "count_rows",
    "fit",
    "fit_layers",
    "load_placement",
    "rank_load",
    "rows_removed",
]
