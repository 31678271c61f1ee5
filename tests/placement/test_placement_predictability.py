"""Grouping experts by what they are selected after: against a slow twin, and where it must and must not act."""

import numpy as np
import pytest
from placement_traces import coupled_routing, independent_routing

from placement import LayerId, fit, fit_layers
from placement.file import DECODER, MTP
from placement.layer_fit import fit_layer
from placement.predictability import predictable_pairs, predictable_pairs_reference
from placement.prediction import (
    LocalityCounter,
    fit_layer_tables,
    fit_tables,
    owners_by_prediction,
    rows_when_shuffled,
)
from placement.rows import contiguous_expert_to_rank
from placement.synthetic import synthetic_routing

CLASSES, MEMBERS = 8, 8


def class_routing(layers=3, tokens=4096, seed=0):
    """[layers, tokens, 2] of 64 experts, and [layers, 64] the class of each expert.

    A token has two classes, which the next layer maps by a fixed permutation, and selects a member of each: in
    half of all cases the same member of both, so that co-selection groups members and prediction classes. One
    token in five selects two members of one class.
    """
    rng = np.random.default_rng(seed)
    first = rng.integers(CLASSES, size=tokens)
    second = np.where(rng.random(tokens) < 0.2, first, (first + rng.integers(1, 8, tokens)) % CLASSES)
    routing, class_of = [], []
    for _ in range(layers):
        ids = rng.permutation(CLASSES * MEMBERS).reshape(CLASSES, MEMBERS)
        member = rng.integers(MEMBERS, size=tokens)
        other = np.where(rng.random(tokens) < 0.6, member, rng.integers(MEMBERS, size=tokens))
        other = np.where((first == second) & (other == member), (member + 1) % MEMBERS, other)
        routing.append(np.stack([ids[first, member], ids[second, other]], axis=1))
        classes = np.empty(CLASSES * MEMBERS, dtype=int)
        classes[ids] = np.arange(CLASSES)[:, None]
        class_of.append(classes)
        following = rng.permutation(CLASSES)
        first, second = following[first], following[second]
    return np.stack(routing), np.stack(class_of)


def together(expert_to_rank, classes) -> float:
    """Share of pairs of experts of one class that share a rank."""
    same = (classes[:, None] == classes[None, :]) & ~np.eye(len(classes), dtype=bool)
    return float((expert_to_rank[:, None] == expert_to_rank[None, :])[same].mean())


@pytest.mark.parametrize("tokens, topk, layers", [(100, 2, 2), (61, 3, 2), (100, 2, 1), (5, 2, 2), (1, 2, 2)])
def test_predictable_pairs_equal_slow_twin(tokens, topk, layers):
    routing = coupled_routing(layers + 1, tokens, 12, topk)
    found = predictable_pairs(routing[-1], routing[:-1], 12)
    expected = predictable_pairs_reference(routing[-1], routing[:-1], 12)
    assert np.allclose(found, expected, atol=1e-4)
    assert np.array_equal(found, found.T) and not found.diagonal().any()


def test_predictable_pairs_are_those_selected_after_the_same_experts():
    routing, class_of = class_routing()
    found = predictable_pairs(routing[2], routing[:2], 64)
    same = class_of[2][:, None] == class_of[2][None, :]
    assert found[same & ~np.eye(64, dtype=bool)].min() > found[~same].max()
    unrelated = predictable_pairs(routing[2], independent_routing(2, 4096, 64), 64)
    assert np.abs(unrelated).sum() < 0.25 * np.abs(found).sum()


def test_evidence_groups_what_can_be_predicted():
    routing, class_of = class_routing()
    plain = fit_layer(routing[2], 64, 8, 8, 0.05)
    fitted = fit_layer(routing[2], 64, 8, 8, 0.05, evidence=routing[:2])
    assert together(plain, class_of[2]) < 0.2 < 0.9 < together(fitted, class_of[2])


def test_fit_for_shuffling_raises_locality_of_unseen_tokens():
    routing, _ = class_routing(4, 8192)
    localities = []
    for for_shuffling in (False, True):
        placement = fit(routing[:, :4096], 8, for_shuffling=for_shuffling)
        counter = LocalityCounter(placement, fit_tables(routing[:, :4096], placement))
        counter.add(routing[:, 4096:])
        localities.append([found[1] for found in counter.results() if found])
    assert (np.array(localities[1]) > np.array(localities[0]) + 0.2).all()
    again = fit(routing[:, :4096], 8, for_shuffling=True, num_workers=2)
    assert again.to_document() == placement.to_document()


def test_only_predicted_layers_look_back():
    routing, _ = class_routing(3)
    ids = [LayerId(DECODER, 0), LayerId(DECODER, 1), LayerId(MTP, 0)]

    def maps(layer_ids, for_shuffling):
        layers = fit_layers(routing, 8, layer_ids=layer_ids, for_shuffling=for_shuffling).layers
        return [layer.expert_to_rank.tolist() for layer in layers]

    plain, fitted = maps(None, False), maps(None, True)
    assert fitted[:2] == plain[:2] and fitted[2] != plain[2]
    assert maps(ids, True) == maps(ids, False)


@pytest.mark.parametrize(
    "routing, ranks",
    [
        (synthetic_routing(4, 4096, 2), 8),
        (coupled_routing(3, 1024, 48, 3), 8),
        (coupled_routing(3, 1024, 32, 2), 8),
        (coupled_routing(2, 1024, 48, 2), 8),
    ],
    ids=["sends more rows", "top-3", "32 experts", "two layers"],
)
def test_placement_stays_where_looking_back_does_not_pay(routing, ranks):
    assert fit(routing, ranks, for_shuffling=True).to_document() == fit(routing, ranks).to_document()


def test_rows_when_shuffled_equal_a_recount():
    routing, _ = class_routing(3, 600)
    seen, unseen = routing[:, :400], routing[:, 400:]
    ranks = contiguous_expert_to_rank(64, 8)
    owners = owners_by_prediction(fit_layer_tables(seen, 2, ranks, 64, 8), unseen, 2)
    rows = sum(len(set(ranks[e]) - {o}) for e, o in zip(unseen[2], owners, strict=True))
    assert rows_when_shuffled(seen, unseen, ranks, 64, 8) == rows
