"""The plan against its slow twin, and rows against an independent count."""

import dataclasses

import pytest
import torch
from routing_cases import random_map, routing_cases

from megatron_ciera.moe import plan, reference
from placement.rows import count_rows, expected_rows_per_token

CASES = routing_cases()


def same(first, second) -> None:
    for field in dataclasses.fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        assert a.dtype == b.dtype and torch.equal(a, b), field.name


def totals(routing_map, ranks):
    table = plan.count(routing_map, ranks).table
    return int(table[:, 0].sum()), int(table[:, -1].sum())


@pytest.mark.parametrize("name", CASES)
def test_send_plan_equals_its_twin(name):
    routing_map, ranks, topk = CASES[name]
    made = plan.plan_send(routing_map, ranks, topk).cut_to(*totals(routing_map, ranks))
    same(made, reference.plan_send_reference(routing_map, ranks, topk))


@pytest.mark.parametrize("name", CASES)
def test_receive_plan_equals_its_twin(name):
    routing_map, ranks, topk = CASES[name]
    local = routing_map.shape[1] // ranks
    made = plan.plan_send(routing_map, ranks, topk).cut_to(*totals(routing_map, ranks))
    table = plan.count(routing_map, ranks).table
    rows, assignments = table[:, 0], table[:, -1]
    for rank, tags in enumerate(made.tags.split(assignments.tolist())):
        received = plan.plan_receive(tags, topk, local, int(rows[rank]))
        same(received, reference.plan_receive_reference(tags, topk, local, int(rows[rank])))


@pytest.mark.parametrize("name", CASES)
def test_rows_are_the_distinct_pairs(name):
    routing_map, ranks, topk = CASES[name]
    local = routing_map.shape[1] // ranks
    pairs = {(token, expert // local) for token, expert in routing_map.nonzero().tolist()}
    rows, assignments = totals(routing_map, ranks)
    assert rows == len(pairs)
    assert assignments == int(routing_map.sum())
    sent = plan.plan_send(routing_map, ranks, topk).cut_to(rows, assignments)
    assert len(sent.token_of_row) == len(pairs)
    assert int((sent.rows_of_token >= 0).sum()) == len(pairs)


def test_rows_agree_with_the_offline_count():
    routing_map = random_map(200, 64, 6)
    experts = routing_map.nonzero()[:, 1].view(200, 6).numpy()
    rows, _ = totals(routing_map, 8)
    assert rows == count_rows(experts, torch.arange(64).numpy() // 8)


def test_uniform_routing_sends_the_expected_rows():
    rows, _ = totals(random_map(20000, 128, 6), 8)
    assert rows / 20000 == pytest.approx(expected_rows_per_token(128, 6, 8), rel=0.01)


def test_rows_received_in_arrival_order_keep_their_experts():
    routing_map, ranks, topk = CASES["top6"]
    local = routing_map.shape[1] // ranks
    made = plan.plan_send(routing_map, ranks, topk).cut_to(*totals(routing_map, ranks))
    table = plan.count(routing_map, ranks).table
    rows = table[:, 0]
    tags = made.tags.split(table[:, -1].tolist())[3]
    received = plan.plan_receive(tags, topk, local, int(rows[3]))
    tokens = made.token_of_row[rows[:3].sum() : rows[:4].sum()]
    experts = torch.repeat_interleave(torch.arange(local), table[3, 1:-1])
    placed = set(zip(tokens[received.row_of_place].tolist(), experts.tolist(), strict=True))
    block = routing_map[:, 3 * local : 4 * local]
    assert placed == {tuple(pair) for pair in block.nonzero().tolist()}
