"""Tells pipeline stages from data parallel ranks when their layer numbers are the same.

Stages of one pipeline route the same tokens at different layers: which expert a token takes at one depends
strongly on which it took at the other. Data parallel ranks route different tokens: position i on one rank has
nothing to do with position i on the other. So dependence of two ranks' records at equal positions, far beyond
that of the same records shifted by a few tokens, shows stages. Where it is absent between ranks taken for
stages, though it is there between layers of one rank, they are none.
"""

from itertools import pairwise

import numpy as np

_FEWEST_TOKENS = 128
_MOST_TOKENS = 8192
_MOST_LAYERS = 4
_SHIFTS = (*range(4, 20), *range(-19, -3))
_STANDARD_DEVIATIONS = 10.0
_YARDSTICK = 6.0
_SHARE = 0.25


def dependence(first: np.ndarray, second: np.ndarray) -> float:
    """How much two ranks' [layers, tokens] experts depend on each other at equal positions.

    In standard deviations beyond short cyclic shifts, which meet the same documents; 0 for fewer than 128
    tokens. Measured: the sum of n_ij^2 / (n_i n_j) over expert pairs, over all pairs of up to four layers.
    """
    num_tokens = min(first.shape[1], second.shape[1], _MOST_TOKENS)
    if num_tokens < _FEWEST_TOKENS:
        return 0.0
    # Both numbered from 0 without gaps, so that no expected count is 0.
    first, second = (
        [np.unique(layer[:num_tokens], return_inverse=True)[1] for layer in experts[:_MOST_LAYERS]]
        for experts in (first, second)
    )
    measured = np.zeros(1 + len(_SHIFTS))
    for one in first:
        for other in second:
            width = int(other.max()) + 1
            expected = np.outer(np.bincount(one), np.bincount(other)).reshape(-1)
            for place, shift in enumerate((0, *_SHIFTS)):
                pairs = np.bincount(one * width + np.roll(other, shift), minlength=len(expected))
                measured[place] += (pairs**2 / expected).sum()
    return float((measured[0] - measured[1:].mean()) / max(measured[1:].std(), 1e-9))


def stages_of(first_choices: dict[int, np.ndarray]) -> list[int]:
    """Ranks that route the tokens of the lowest rank at other layers; [] when none does.

    `first_choices`: rank -> [layers, tokens] of ranks taken for data parallel ones. Asked are the ranks where
    a second stage can begin (a divisor of the number of ranks away). Exactly equal experts (tensor parallel
    copies) are no stage.
    """
    lowest, *others = sorted(first_choices)
    num_ranks = max(first_choices) - lowest + 1
    reference = first_choices[lowest]
    return [
        rank
        for rank in others
        if num_ranks % (rank - lowest) == 0
        and not np.array_equal(reference, first_choices[rank])
        and dependence(reference, first_choices[rank]) > _STANDARD_DEVIATIONS
    ]


class StageCheck:
    """Whether ranks taken for stages route the same tokens, from one step after the other.

    The yardstick is how much the two halves of a rank's own layers depend on each other. Both are sums of
    `dependence` over ranks and steps, in standard deviations. In recorded routing, trained and not, real
    stages depend about as much as the halves do.
    """

    def __init__(self):
        self.between, self.inside = [], []
        self.num_tokens = 0

    @property
    def is_shown(self) -> bool:
        """True once the records have shown that they are stages."""
        return _pooled(self.between) > _STANDARD_DEVIATIONS

    def add(self, stages: list[np.ndarray]) -> bool:
        """Adds the [layers, tokens] first choices of ranks taken for consecutive stages, of the same step.

        True when the records so far contradict it. Beyond 8,192 tokens nothing is looked at any more.
        """
        num_tokens = min((experts.shape[1] for experts in stages), default=0)
        if num_tokens < _FEWEST_TOKENS or self.num_tokens > _MOST_TOKENS or self.is_shown:
            return False
        self.num_tokens += num_tokens
        self.inside += [_between(*np.split(e, [len(e) // 2])) for e in stages if len(e) > 1]
        self.between += [_between(*pair) for pair in pairwise(stages)]
        inside = _pooled(self.inside)
        return bool(self.between) and inside > _YARDSTICK and _pooled(self.between) < _SHARE * inside


def _between(before: np.ndarray, behind: np.ndarray) -> float:
    """Dependence of layers on those right behind them; 0 for equal ones, which are copies of a rank."""
    return 0.0 if np.array_equal(before, behind) else dependence(before[::-1], behind)


def _pooled(deviations: list[float]) -> float:
    return sum(deviations) / len(deviations) ** 0.5 if deviations else 0.0
