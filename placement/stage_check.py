"""Tells pipeline stages from data parallel ranks when their layer numbers are the same.

Stages of one pipeline route the same tokens at different layers: which expert a token takes at one depends
strongly on which it took at the other. Data parallel ranks route different tokens: position i on one rank has
nothing to do with position i on the other. So dependence of two ranks' records at equal positions, far beyond
that of the same records shifted by a few tokens, shows stages.
"""

import numpy as np

_FEWEST_TOKENS = 128
_MOST_TOKENS = 8192
_MOST_LAYERS = 4
_SHIFTS = (*range(4, 20), *range(-19, -3))
_STANDARD_DEVIATIONS = 10.0


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
