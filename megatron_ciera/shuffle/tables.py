"""Prediction tables on the device, in fixed point, so that every rank computes the same scores whatever it is.

E experts, N ranks, k experts a token, T tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from placement.prediction import LayerTables

FRACTION_BITS = 12


@dataclass(frozen=True, eq=False)
class ScoreTables:
    """`placement.prediction.LayerTables` of one layer as integers, in units of 2^-12 assignments.

    previous, before: [E, N] int32, half of the single-expert tables. pair_row: [E * E] int32, row of a pair
    (expert one layer before * E + expert two layers before) in `corrections`: [pairs + 1, N] int32, what a pair
    predicts beyond its single tables; row 0 is zero, for pairs that are not known.
    """

    previous: torch.Tensor
    before: torch.Tensor
    pair_row: torch.Tensor
    corrections: torch.Tensor

    @classmethod
    def of(cls, tables: LayerTables, device) -> "ScoreTables":
        """Rounds the tables of a layer and puts them on `device`."""
        num_experts = len(tables.previous)
        first, second = tables.pair_keys // num_experts, tables.pair_keys % num_experts
        corrections = tables.pair_tables - (tables.previous[first] + tables.before[second]) / 2.0
        pair_row = np.zeros(num_experts * num_experts, dtype=np.int32)
        pair_row[tables.pair_keys] = np.arange(1, len(tables.pair_keys) + 1)
        padded = np.concatenate([np.zeros((1, tables.num_ranks)), corrections])
        fixed = (_fixed(tables.previous / 2.0), _fixed(tables.before / 2.0), pair_row, _fixed(padded))
        return cls(*(torch.from_numpy(array).to(device) for array in fixed))

    def scores(self, previous: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """[T, N] int64: expected assignments on each rank, times k * k * 2^12.

        previous, before: [T, k] int64 experts one and two MoE layers before. Sums of integers: exact. Allocates
        [T, k * k, N] int32. No host synchronisation.
        """
        topk, num_experts = previous.shape[1], len(self.previous)
        keys = previous[:, :, None] * num_experts + before[:, None, :]
        pairs = self.corrections[self.pair_row[keys.flatten(1)]].sum(1)
        return pairs + topk * (self.previous[previous].sum(1) + self.before[before].sum(1))


def _fixed(values: np.ndarray) -> np.ndarray:
    return np.round(values * 2**FRACTION_BITS).astype(np.int32)
