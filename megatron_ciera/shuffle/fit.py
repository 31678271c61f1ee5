"""Prediction tables fitted in the run: routing of one iteration recorded, fitted beside training, then installed.

python -m megatron_ciera.shuffle.fit < windows.npz > tables.pickle  is the process that fits. Imports no Megatron.
"""

import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megatron_ciera import background
from placement.prediction import LayerTables, fit_layer_tables


class RoutingRecorder:
    """Experts of the first `wanted` tokens that each MoE layer of a chunk routes while it is in place."""

    def __init__(self, wanted: int):
        self.wanted = wanted
        self._kept: dict[int, list[torch.Tensor]] = {}

    def add(self, layer: int, experts: torch.Tensor) -> None:
        """[T, k] int64 experts in canonical order, the same tokens in every layer. No host synchronisation."""
        kept = self._kept.setdefault(layer, [])
        missing = self.wanted - sum(map(len, kept))
        if missing > 0:
            kept.append(experts[:missing].to(torch.int16))

    def take(self) -> dict[int, np.ndarray]:
        """Layer -> [tokens, k] int16. NOTE: device-to-host copy."""
        return {layer: torch.cat(parts).cpu().numpy() for layer, parts in self._kept.items()}


@dataclass(frozen=True, eq=False)
class Window:
    """What the tables of one layer are fitted on. top_indices: [3, tokens, k], two MoE layers before first."""

    top_indices: np.ndarray
    expert_to_rank: np.ndarray


def windows_of(
    recorded: Mapping[int, np.ndarray], expert_to_rank: Mapping[int, np.ndarray], last: int
) -> dict[int, Window]:
    """Windows of the layers of a chunk that can shuffle: behind two MoE layers, and not the `last`."""
    moe = sorted(recorded)
    windows = {}
    for two_before, before, target in zip(moe, moe[1:], moe[2:], strict=False):
        if target != last:
            rows = [recorded[layer] for layer in (two_before, before, target)]
            windows[target] = Window(np.stack(rows), expert_to_rank[target])
    return windows


def start(windows: list[Window], num_experts: int, num_ranks: int) -> subprocess.Popen:
    """Starts the fit and returns at once; `tables_of` waits for it."""
    arrays = {"sizes": np.array([num_experts, num_ranks])}
    for index, window in enumerate(windows):
        arrays[f"top_indices_{index}"] = window.top_indices
        arrays[f"expert_to_rank_{index}"] = window.expert_to_rank
    return background.start("megatron_ciera.shuffle.fit", **arrays)


def tables_of(process: subprocess.Popen) -> list[LayerTables] | str:
    """Waits for a started fit: tables in the order of its windows, or why there are none.

    What is read is what this package's own process wrote; anything else that it printed is a reason, too.
    """
    try:
        return pickle.loads(background.output_of(process))
    except background.FitFailedError as error:
        return str(error)
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError) as error:
        return f"the fit answered with something else than tables: {error}"


def main() -> None:
    with background.read_arrays() as given:
        num_experts, num_ranks = given["sizes"].tolist()
        count = sum(name.startswith("top_indices") for name in given.files)
        tables = [
            fit_layer_tables(
                given[f"top_indices_{index}"].astype(np.int64),
                2,
                given[f"expert_to_rank_{index}"],
                num_experts,
                num_ranks,
            )
            for index in range(count)
        ]
    sys.stdout.buffer.write(pickle.dumps(tables))


if __name__ == "__main__":
    main()
