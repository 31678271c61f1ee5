"""Hand-made routing and trace files for the placement tests."""

import json

import numpy as np


def coupled_routing(layers=2, tokens=1024, num_experts=16, topk=2, seed=0, noise=0.2):
    """[layers, tokens, topk] int32: tokens follow hidden groups of topk + 1 experts scattered over ids."""
    rng = np.random.default_rng(seed)
    result = np.empty((layers, tokens, topk), dtype=np.int32)
    for layer in range(layers):
        order = rng.permutation(num_experts)
        group = rng.integers(num_experts // (topk + 1), size=tokens)
        scores = rng.random((tokens, num_experts))
        members = np.zeros((tokens, num_experts), dtype=bool)
        for offset in range(topk + 1):
            members[np.arange(tokens), order[group * (topk + 1) + offset]] = True
        scores += np.where(members & (rng.random((tokens, 1)) > noise), 10.0, 0.0)
        result[layer] = np.argsort(-scores, axis=1)[:, :topk]
    return result


def independent_routing(layers=2, tokens=1024, num_experts=16, topk=2, seed=0):
    """[layers, tokens, topk] int32: every token takes a uniformly random set (forced balancing)."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((layers, tokens, num_experts)), axis=2)[..., :topk].astype(np.int32)


def record(step, layer, top_indices, rank=0, block="decoder", mtp_idx=None):
    """One line of a Megatron routing trace."""
    fields = {"step": step, "stage": "pre_dispatch", "block": block, "layer": layer, "rank": rank}
    fields |= {"num_tokens": len(top_indices), "topk": len(top_indices[0])}
    if mtp_idx is not None:
        fields["mtp_idx"] = mtp_idx
    return json.dumps({**fields, "top_indices": np.asarray(top_indices).tolist()})


def write_rank(folder, rank, lines, end="\n"):
    """Writes router_trace_rank{rank}.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"router_trace_rank{rank}.jsonl"
    path.write_text("\n".join(lines) + end)
    return path


def write_run(folder, routing, steps, records, ranks, tokens, stages=1, first_step=0):
    """Writes a whole run so that reading it in the order (step, record, rank) gives `routing` back.

    `routing`: [layers, steps * records * ranks * tokens, topk]; `ranks`: ranks of one stage; layers are split
    evenly over `stages`.
    """
    layers, _, topk = routing.shape
    shaped = routing.reshape(layers, steps, records, ranks, tokens, topk)
    per_stage = layers // stages
    for stage in range(stages):
        for column in range(ranks):
            rank = stage * ranks + column
            lines = [
                record(first_step + s, i, shaped[stage * per_stage + i, s, r, column], rank)
                for s in range(steps)
                for r in range(records)
                for i in range(per_stage)
            ]
            write_rank(folder, rank, lines)
