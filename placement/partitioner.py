"""Mt-KaHyPar as a comparison (extra `partitioners`): a general hypergraph partitioner on the same tokens."""

import os
from functools import cache

import numpy as np


def mt_kahypar_ranks(top_indices: np.ndarray, num_experts: int, num_ranks: int, seed: int = 0) -> np.ndarray:
    """[num_experts] ranks by Mt-KaHyPar (QUALITY, km1, equal sizes); every token is a hyperedge.

    Equal expert sets are one weighted hyperedge. Raises ValueError when the package is missing or its blocks
    are not equal.
    """
    try:
        import mtkahypar
    except ImportError:
        raise ValueError("mtkahypar is not installed; pip install 'megatron-ciera[partitioners]'") from None
    sets, weights = np.unique(np.sort(top_indices, axis=1), axis=0, return_counts=True)
    kahypar = _initialized()
    context = kahypar.context_from_preset(mtkahypar.PresetType.QUALITY)
    context.set_partitioning_parameters(num_ranks, 0.0, mtkahypar.Objective.KM1)
    mtkahypar.set_seed(seed)
    context.logging = False
    hypergraph = kahypar.create_hypergraph(
        context, num_experts, len(sets), sets.tolist(), [1] * num_experts, weights.tolist()
    )
    partition = hypergraph.partition(context)
    ranks = np.array([partition.block_id(expert) for expert in range(num_experts)])
    sizes = np.bincount(ranks, minlength=num_ranks)
    if (sizes != num_experts // num_ranks).any():
        raise ValueError(
            f"mtkahypar: experts per rank are {sizes.tolist()}, wanted {num_experts // num_ranks}"
        )
    return ranks


@cache
def _initialized():
    """Mt-KaHyPar's handle: it may be initialised once in a process."""
    import mtkahypar

    return mtkahypar.initialize(len(os.sched_getaffinity(0)))
