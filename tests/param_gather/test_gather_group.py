"""Gathers over gloo against the true values, bit for bit: codecs, sizes of groups, overlap, what goes raw and why."""

import pytest
import torch

from megatron_ciera.param_gather.bucket import RAW
from megatron_ciera.param_gather.layout import Run
from tests.param_gather.gather_world import Model, run_world


def _runs(count: int) -> list[Run]:
    """Classes that do not line up with shards, pieces or blocks."""
    third = count // 3
    return [Run(0, third, "expert"), Run(third, third + 64, "norm"), Run(third + 64, count, "attention")]


def _buckets(size: int) -> tuple[list[int], list[list[Run]]]:
    counts = [128 * size * 97, 128 * size, 128 * size * 33]
    return counts, [_runs(count) for count in counts]


def _mixed(segment) -> str:
    return {"expert": "delta", "attention": "exponent-reuse", "norm": RAW}[segment.kind]


def _steps(rank, size, dtype, codec):
    model = Model(*_buckets(size), dtype=dtype, codec=codec, warmup=2)
    exact, sent = [], []
    for step in range(6):
        model.step()
        if step % 2:
            model.group.encode_ahead()
            model.gather_overlapped()
        else:
            model.gather()
        exact.append(model.exact())
        sent.append(model.ledger.take(["bytes_raw", "bytes_sent", "raw_gathers", "coded_gathers"]))
    model.gather()
    return exact, sent, model.ledger.take(["bytes_raw", "bytes_sent", "unchanged"])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "dtype, codec",
    [(torch.bfloat16, "delta"), (torch.float16, "exponent-reuse"), (torch.float32, _mixed)],
    ids=["bf16-delta", "fp16-exponent-reuse", "fp32-mixed"],
)
def test_bits_of_every_shard(size, dtype, codec):
    for exact, sent, unchanged in run_world(size, _steps, size, dtype, codec):
        assert all(exact)
        raw, warm = sent[0][:2]
        assert raw == warm
        assert [counts[2] for counts in sent[:2]] == [3, 3]
        assert unchanged == [0, 0, 3]
        if size > 1:
            assert all(counts[3] >= 2 and counts[1] < counts[0] for counts in sent[2:])


def _hot_step(rank):
    model = Model(*_buckets(2), warmup=1)
    results = []
    for learning_rate in (3e-4, 3e-4, 1e3, 3e-4):
        model.step(learning_rate)
        model.gather()
        results.append((model.exact(), *model.ledger.take(["coded_gathers", "raw_fallbacks/incompressible"])))
    return results


def test_hot_step_is_exact_and_falls_back_on_all_ranks_alike():
    first, second = run_world(2, _hot_step)
    assert all(exact for exact, *_ in first + second)
    assert [coded for _, coded, _ in first] == [coded for _, coded, _ in second]
    assert first[3][1] > 0 and first[1][1] > 0


def _invalidated(rank):
    model = Model(*_buckets(2), warmup=1)
    for _ in range(2):
        model.step()
        model.gather()
    model.ledger.take(["raw_fallbacks/invalidated", "raw_gathers"])
    model.step()
    model.group.encode_ahead()
    for index, values in enumerate(model.values):  # as an expert migration does, between step and gather
        shard = slice(rank * values.numel() // 2, (rank + 1) * values.numel() // 2)
        values[shard] = values[shard].flip(0)
        model.expected[index] = torch.cat([half.flip(0) for half in model.expected[index].chunk(2)])
    model.group.forget()
    model.gather()
    first = (model.exact(), *model.ledger.take(["raw_fallbacks/invalidated", "raw_gathers"]))
    model.step()
    model.gather()
    return first, (model.exact(), *model.ledger.take(["raw_fallbacks/invalidated", "raw_gathers"]))


def test_rewritten_weights_go_raw_once_after_they_were_declared():
    for rank, (first, second) in enumerate(run_world(2, _invalidated)):
        assert first == (True, 3 if rank == 0 else 0, 3)
        assert second == (True, 0, 1)  # the bucket of 256 values: a header costs more than it saves
