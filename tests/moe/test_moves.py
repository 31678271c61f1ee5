"""Moves and transfers: pieces of shards cover exactly what every receiver needs."""

import numpy as np
import pytest

from megatron_ciera.moe.moves import Move, moves, transfers


def test_moves_list_changed_slots_only():
    assert moves(np.array([0, 1, 2, 3]), np.array([0, 2, 1, 3])) == [Move(2, 1), Move(1, 2)]
    assert moves(np.array([3, 1, 0, 2]), np.array([3, 1, 0, 2])) == []


@pytest.mark.parametrize("seed", range(5))
def test_moves_carry_every_expert_to_its_slot(seed):
    rng = np.random.default_rng(seed)
    old, new = rng.permutation(16), rng.permutation(16)
    found = old.copy()
    for move in moves(old, new):
        found[move.target] = old[move.source]
    assert np.array_equal(found, new)


def cover(source, target):
    held = {("source", r): span for r, span in enumerate(source)}
    held |= {("target", r): span for r, span in enumerate(target)}
    found = list(transfers(Move(0, 5), held, len(source)))
    got = [[] for _ in target]
    for part in found:
        assert source[part.sender][0] <= part.start < part.stop <= source[part.sender][1]
        got[part.receiver] += range(part.start, part.stop)
    for span, values in zip(target, got, strict=True):
        assert sorted(values) == (list(range(*span)) if span else [])
    return found


def test_shards_at_other_offsets():
    cover([(0, 30), (30, 64)], [(0, 17), (17, 64)])
    cover([(0, 64), None], [None, (0, 64)])
    cover([None, (0, 9), (9, 64), None], [(0, 1), (1, 2), None, (2, 64)])


def test_replicas_stay_on_their_own_rank():
    found = cover([(0, 64), (0, 64)], [(0, 64), (0, 64)])
    assert [(part.sender, part.receiver) for part in found] == [(0, 0), (1, 1)]


def test_missing_values_are_an_error():
    held = {("source", 0): (0, 10), ("target", 0): (0, 12)}
    with pytest.raises(ValueError, match=r"no rank holds the values \[\(10, 12\)\] of slot 0 that slot 5"):
        list(transfers(Move(0, 5), held, 1))
