"""Which expert-parallel groups are worth two hops."""

import pytest

from megatron_ciera.moe.node_groups import places


@pytest.mark.parametrize(
    ("ranks", "per_host", "expected"),
    [
        (range(8), 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([0, 2, 4, 6, 8, 10, 12, 14], 8, [[0, 2, 4, 6], [8, 10, 12, 14]]),
        (range(8), 8, None),
        ([0, 8, 16, 24], 8, None),
        (range(6), 4, None),
        ([0, 4, 1, 5], 4, None),
    ],
    ids=["two nodes", "strided", "one node", "one rank a node", "unequal", "not by node"],
)
def test_places(ranks, per_host, expected):
    assert places(list(ranks), per_host) == expected
