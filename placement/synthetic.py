"""SYNTHETIC routing calibrated to the statistics of the expert-coupling paper; not a recording of any model.

Every token carries a hidden class per layer that moves to the next layer's class by a fixed permutation with
probability `persistence`, and is drawn anew otherwise. Expert ids are scattered at random in every layer.
- top-2: 64 classes, each a pair of experts. A token takes one expert of its pair (the first one with
  probability `FIRST_EXPERT`), and with the pair's own probability the other as well; 14 tight pairs. What is
  left is drawn from the class's group of eight pairs with probability `GROUP_SECOND`, else from all experts.
- top-6: 32 classes, each four experts in a group of sixteen. Each of the four is taken with probability
  `QUAD_TAKEN`, each other of the group with `GROUP_TAKEN`, and the rest are drawn from all experts.
Calibrated by hand to what the paper states: 42 % of top-2 tokens on 64 of 8,128 pairs, 14 pairs of 50 %
confidence or more with 16 % of the tokens, a median of 48 % of an expert's tokens to one next-layer expert,
and the rows removed of its offline table.
"""

import numpy as np

NUM_EXPERTS = 128
TIGHT_PAIRS, TIGHT_TAKEN, LOOSE_TAKEN = 14, 0.72, 0.32
FIRST_EXPERT, GROUP_SECOND = 0.74, 0.22
QUAD_TAKEN, GROUP_TAKEN = 0.73, 0.11
PERSISTENCE = {2: 0.81, 6: 0.84}


def synthetic_routing(
    num_layers: int, num_tokens: int, topk: int, seed: int = 0, persistence: float | None = None
) -> np.ndarray:
    """[layers, tokens, topk] uint8 of 128 experts, topk 2 or 6, first choice first. Same seed, same trace."""
    if topk not in (2, 6):
        raise ValueError(f"topk is {topk}: the generator is calibrated for top-2 and top-6 only")
    rng = np.random.default_rng(seed)
    if persistence is None:
        persistence = PERSISTENCE[topk]
    num_classes = 64 if topk == 2 else 32
    draw = _draw_pairs if topk == 2 else _draw_quads
    classes = rng.integers(num_classes, size=num_tokens)
    layers = np.empty((num_layers, num_tokens, topk), dtype=np.uint8)
    for layer in range(num_layers):
        scattered = rng.permutation(NUM_EXPERTS)
        layers[layer] = scattered[draw(rng, classes)]
        stays = rng.random(num_tokens) < persistence
        anew = rng.integers(num_classes, size=num_tokens)
        classes = np.where(stays, rng.permutation(num_classes)[classes], anew)
    return layers


def _draw_pairs(rng, classes: np.ndarray) -> np.ndarray:
    """[tokens, 2]: experts 2 c and 2 c + 1 are class c; classes 8 g .. 8 g + 7 are group g."""
    num_tokens = len(classes)
    first = 2 * classes + (rng.random(num_tokens) >= FIRST_EXPERT)
    taken = np.where(classes % 64 < TIGHT_PAIRS, TIGHT_TAKEN, LOOSE_TAKEN)
    in_group = classes // 8 * 16 + rng.integers(16, size=num_tokens)
    other = np.where(
        rng.random(num_tokens) < GROUP_SECOND, in_group, rng.integers(NUM_EXPERTS, size=num_tokens)
    )
    second = np.where(rng.random(num_tokens) < taken, first ^ 1, other)
    second = np.where(second == first, (first + 2) % NUM_EXPERTS, second)
    return np.stack([first, second], axis=1)


def _draw_quads(rng, classes: np.ndarray) -> np.ndarray:
    """[tokens, 6]: experts 4 c .. 4 c + 3 are class c; classes 4 g .. 4 g + 3 are group g."""
    keys = rng.random((len(classes), NUM_EXPERTS))
    experts = np.arange(NUM_EXPERTS)
    chance = rng.random((len(classes), NUM_EXPERTS))
    quad = experts // 4 == classes[:, None]
    group = experts // 16 == classes[:, None] // 4
    keys += 2.0 * (quad & (chance < QUAD_TAKEN))
    keys += 1.0 * (group & ~quad & (chance < GROUP_TAKEN))
    top = np.argpartition(-keys, 6, axis=1)[:, :6]
    order = np.argsort(-np.take_along_axis(keys, top, axis=1), axis=1)
    return np.take_along_axis(top, order, axis=1)


def pair_statistics(top_indices: np.ndarray, num_experts: int = NUM_EXPERTS) -> dict:
    """The paper's numbers for one layer of top-2 routing, as shares of all tokens.

    `top_pairs`: tokens on the 0.8 % most frequent pairs; `confident_pairs`: pairs selected by at least half
    of the tokens of one of their experts; `confident_tokens`: tokens on those.
    """
    from placement.co_selection import co_selection, expert_counts

    matrix = co_selection(top_indices, num_experts)
    upper = np.triu_indices(num_experts, 1)
    counts = matrix[upper]
    loads = expert_counts(top_indices, num_experts)
    most = np.sort(counts)[::-1][: round(0.00787 * len(counts))].sum()
    fewest = np.maximum(1, np.minimum(loads[upper[0]], loads[upper[1]]))
    confident = counts / fewest >= 0.5
    num_tokens = len(top_indices)
    return {
        "top_pairs": float(most / num_tokens),
        "confident_pairs": int(confident.sum()),
        "confident_tokens": float(counts[confident].sum() / num_tokens),
    }
