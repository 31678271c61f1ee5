"""Metrics on hand-made matrices."""

import pytest
import torch

from megatron_ciera.moe import plan
from megatron_ciera.moe.counters import LayerCounter, Volume, metrics, summaries

NAMES = ["layer_0", "layer_1"]


def counted(my_rank, nodes=(0, 0, 1, 1)):
    """Four ranks of two experts each; three tokens with experts (0, 1), (0, 4) and (6, 7)."""
    routing_map = torch.zeros(3, 8, dtype=torch.bool)
    for token, experts in enumerate([(0, 1), (0, 4), (6, 7)]):
        routing_map[token, list(experts)] = True
    counter = LayerCounter.zeros(4, 8, "cpu")
    counter.add(plan.count(routing_map, 4).table, 3)
    return counter, summaries([counter], my_rank, torch.tensor(nodes) == nodes[my_rank])[0]


def test_summary():
    _, summary = counted(my_rank=1)
    # rows, assignments, tokens, assignments that stay; rows and assignments to node 0's other rank, then to node 1
    assert summary.tolist() == [4, 6, 3, 0, 2, 2, 3, 3, 3, 0, 1, 2]


def test_summary_of_a_rank_that_keeps_its_rows():
    _, summary = counted(my_rank=0)
    assert summary[:8].tolist() == [4, 6, 3, 3, 0, 2, 0, 3]


def test_reset():
    counter, _ = counted(my_rank=0)
    counter.reset()
    assert not summaries([counter], 0, torch.ones(4, dtype=torch.bool)).any()


def test_layers_of_other_stages_are_zero():
    counter, summary = counted(my_rank=1)
    found = summaries([None, counter, None], 1, torch.tensor([True, True, False, False]))
    assert torch.equal(found[1], summary) and not found[[0, 2]].any()
    assert not summaries([None], 1, torch.ones(4, dtype=torch.bool)).any()


def test_deduplicated_volume():
    _, summary = counted(my_rank=1)
    values = metrics(torch.stack([summary, summary]), Volume(True, row_bytes=100, assignment_bytes=5), NAMES)
    assert values["moe/rows_sent"] == 8
    assert values["moe/rows_stock"] == 12
    assert values["moe/tokens"] == 6
    assert values["moe/bytes_combine"] == 2 * 4 * 100
    assert values["moe/bytes_dispatch"] == 2 * (4 * 100 + 6 * 5)
    assert values["moe/bytes_sent"] == values["moe/bytes_intra_node"] + values["moe/bytes_inter_node"]
    assert values["moe/bytes_intra_node"] == 2 * (2 * 100 + 3 * 5 + 2 * 100)
    assert values["moe/rows_removed"] == pytest.approx(1 - 4 / 6)
    assert values["moe/rank_load"] == pytest.approx(3 / 1.5)


def test_stock_volume():
    _, summary = counted(my_rank=1)
    values = metrics(summary[None], Volume(False, row_bytes=100, assignment_bytes=4), NAMES[:1])
    assert values["moe/rows_sent"] == values["moe/rows_stock"] == 6
    assert values["moe/bytes_sent"] == 2 * 6 * 100 + 6 * 4


def test_percentiles_are_over_layers():
    rows = torch.zeros(3, 12, dtype=torch.int64)
    rows[:, 1] = 100
    rows[:, 0] = torch.tensor([90, 50, 10])
    rows[:, 8:] = torch.tensor([[25, 25, 25, 25], [40, 20, 20, 20], [100, 0, 0, 0]])
    values = metrics(rows, None, ["layer_0", "layer_2", "mtp_0"])
    assert values["moe/rows_removed_p50"] == pytest.approx(0.5)
    assert values["moe/rank_load_p50"] == pytest.approx(1.6)
    assert values["moe/rank_load"] == pytest.approx((1 + 1.6 + 4) / 3)
    assert values["moe/rank_load/layer_2"] == pytest.approx(1.6)
    assert values["moe/rows_removed/mtp_0"] == pytest.approx(0.9)
    assert "moe/rows_sent" not in values


def test_an_interval_without_tokens():
    values = metrics(torch.zeros(2, 12, dtype=torch.int64), Volume(True, 100, 5), NAMES)
    assert values["moe/rows_sent"] == 0
    assert not any(name.startswith("moe/rows_removed") for name in values)


def test_locality_is_the_share_that_stays_on_its_rank():
    summaries_of_ranks = [counted(rank)[1] for rank in range(4)]
    values = metrics(torch.stack([sum(summaries_of_ranks), torch.zeros(12, dtype=torch.int64)]), None, NAMES)
    # Every rank counts the same 6 assignments; ranks 0 to 3 hold 3, 0, 1 and 2 of the experts that they ask for.
    assert values["moe/locality/layer_0"] == pytest.approx(6 / 24)
    assert "moe/locality/layer_1" not in values
