"""Fitting: deterministic, held-out choice per layer, refusal of what cannot or should not be fitted."""

import numpy as np
import pytest
from placement_traces import coupled_routing, independent_routing

from placement import NoGainError, fit, fit_layers, rows_removed


def test_fit_gains_on_unseen_tokens_and_repeats():
    routing = coupled_routing(layers=3, tokens=4096)
    placement = fit(routing[:, :2048], 4)
    for index in range(3):
        unseen = routing[index, 2048:]
        contiguous = np.arange(16) // 4
        assert rows_removed(unseen, placement.expert_to_rank(index)) > rows_removed(unseen, contiguous) + 0.1
    assert placement.to_document() == fit(routing[:, :2048], 4, num_workers=2).to_document()


def test_layer_without_coupling_stays_contiguous():
    routing = np.concatenate([coupled_routing(2, 2048), independent_routing(1, 2048)])
    result = fit_layers(routing, 4)
    assert [layer.changed for layer in result.layers] == [True, True, False]
    assert result.placement.layers[2].is_contiguous
    assert result.layers[2].rows_removed == result.layers[2].rows_removed_contiguous


@pytest.mark.parametrize("num_experts, topk, ranks", [(128, 6, 8), (16, 2, 4), (8, 2, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_balanced_routing_is_refused(num_experts, topk, ranks, seed):
    routing = independent_routing(12, 2048, num_experts, topk, seed)
    with pytest.raises(
        NoGainError,
        match="no layer gains beyond chance from 2048 tokens.*force-load-balancing",
    ):
        fit(routing, ranks)


@pytest.mark.parametrize(
    "routing, arguments, message",
    [
        (coupled_routing(), {"expert_parallel_size": 1}, "with one rank there is nothing to place"),
        (coupled_routing(), {"expert_parallel_size": 5}, "15 experts|16 experts are not divisible by .* 5"),
        (coupled_routing()[..., :1], {"expert_parallel_size": 4}, "topk = 1"),
        (
            coupled_routing(),
            {"expert_parallel_size": 4, "ranks_per_node": 3},
            "multiple of --ranks-per-node 3",
        ),
        (coupled_routing()[0], {"expert_parallel_size": 4}, r"wanted \[layers, tokens, topk\]"),
        (coupled_routing()[:, :0], {"expert_parallel_size": 4}, "the trace is empty"),
        (
            coupled_routing(),
            {"expert_parallel_size": 4, "num_experts": 8},
            r"expert id \d+ is out of range 0..7",
        ),
        (
            coupled_routing() - 1,
            {"expert_parallel_size": 4, "num_experts": 16},
            "expert id -1 is out of range",
        ),
    ],
)
def test_refused_input(routing, arguments, message):
    with pytest.raises(ValueError, match=message):
        fit(routing, **arguments)


def test_expert_twice_in_one_token():
    routing = coupled_routing()
    routing[1, 77] = [3, 3]
    with pytest.raises(ValueError, match="layer 1, token 77: expert 3 is selected twice"):
        fit(routing, 4)


def test_stray_id_does_not_become_the_number_of_experts():
    routing = coupled_routing()
    routing[0, 5, 0] = 999
    with pytest.raises(ValueError, match="largest expert id is 999 but only 1[67] different experts"):
        fit(routing, 4)
