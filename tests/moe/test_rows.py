"""Expanding and reducing rows: bits against the slow twin, gradients against each other and numerically."""

import pytest
import torch
from routing_cases import routing_cases

from megatron_ciera.moe import plan
from megatron_ciera.moe.rows import expand, gather_rows, pick, reduce, sum_rows, sum_rows_reference

CASES = routing_cases()


def tables(name):
    routing_map, ranks, topk = CASES[name]
    table = plan.count(routing_map, ranks).table
    send = plan.plan_send(routing_map, ranks, topk).cut_to(int(table[:, 0].sum()), int(table[:, -1].sum()))
    return send.token_of_row, send.rows_of_token


def bits(x):
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_sum_equals_its_twin_bit_for_bit(name, dtype):
    source, table = tables(name)
    torch.manual_seed(0)
    x = torch.randn(len(source), 24).to(dtype)
    assert torch.equal(bits(sum_rows(x, table)), bits(sum_rows_reference(x, table)))


def test_a_row_of_one_place_keeps_its_bits():
    x = torch.tensor([[0.1, -3e38, 6e-41, float("inf")]], dtype=torch.bfloat16)
    assert torch.equal(bits(sum_rows(x, torch.tensor([[0, -1]]))), bits(x))


def test_rows_without_a_place_are_zero_even_beside_nan():
    x = torch.full((2, 3), float("nan"))
    assert torch.equal(sum_rows(x, torch.tensor([[-1, -1]])), torch.zeros(1, 3))


def test_sums_are_rounded_once():
    x = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert sum_rows(x, torch.tensor([[0, 1, 2]])).item() == 258.0
    assert ((x[0] + x[1]) + x[2]).item() == 256.0


@pytest.mark.parametrize("name", ["top2", "top6", "dropped tokens and an empty expert", "nothing routed"])
def test_gradients(name):
    source, table = tables(name)
    x = torch.randn(len(table), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: expand(x, source, table), (x,))
    y = torch.randn(len(source), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda y: reduce(y, source, table), (y,))


def test_backward_of_expand_is_the_ordered_sum():
    source, table = tables("top6")
    x = torch.randn(len(table), 8).bfloat16().requires_grad_()
    grad = torch.randn(len(source), 8).bfloat16()
    expand(x, source, table).backward(grad)
    assert torch.equal(bits(x.grad), bits(sum_rows_reference(grad, table)))


def test_backward_of_reduce_is_a_copy():
    source, table = tables("top6")
    y = torch.randn(len(source), 8).bfloat16().requires_grad_()
    grad = torch.randn(len(table), 8).bfloat16()
    reduce(y, source, table).backward(grad)
    assert torch.equal(bits(y.grad), bits(gather_rows(grad, source)))


def test_pick():
    x = torch.randn(10, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([7, 0, 3])
    assert torch.equal(pick(x, index), x[index])
    assert torch.autograd.gradcheck(lambda x: pick(x, index), (x,))
