"""Gathers over gloo against the true values, bit for bit: codecs, sizes of groups, overlap, what goes raw and why."""

import pytest
import torch

from megatron_ciera.param_gather.bucket import RAW
from megatron_ciera.param_gather.layout import ClassRun
from megatron_ciera.param_gather.waves import NUM_ARENAS
from tests.param_gather.gather_world import SMALL, Model, run_world


def _runs(count: int) -> list[ClassRun]:
    """Classes that do not line up with shards, pieces or blocks."""
    third = count // 3
    return [
        ClassRun(0, third, "expert"),
        ClassRun(third, third + 64, "norm"),
        ClassRun(third + 64, count, "attention"),
    ]


def _buckets(size: int) -> tuple[list[int], list[list[ClassRun]]]:
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
        counted = ["bytes_raw", "bytes_sent", "raw_gathers", "coded_gathers", "raw_gathers/warm_up"]
        sent.append(model.ledger.take(counted))
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
        assert [counts[4] for counts in sent] == [3, 3, 0, 0, 0, 0]
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


def _hot_piece(rank):
    """One piece of one bucket cannot be compressed: it alone goes raw, on all ranks."""
    model = Model(*_buckets(2), warmup=1)
    for step in range(2):
        model.step()
        if step:
            piece = model.group.buckets[0].pieces[1]
            hot, random = model.expected[0].clone(), torch.Generator().manual_seed(7)
            words = torch.randint(-(2**15), 2**15, (piece.length,), generator=random, dtype=torch.int16)
            hot[piece.start : piece.start + piece.length] = words.view(torch.bfloat16)
            model.set_next(0, hot)
        model.gather()
    counts = model.ledger.take(["coded_gathers", "raw_fallbacks/incompressible"])
    return model.exact(), [sizes.raw for sizes in model.group.buckets[0].sizes], counts


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


def _forgotten_on_the_way(rank):
    """Weights are declared to be rewritten between the start of a gather and its end."""
    model = Model(*_buckets(2), warmup=1)
    for _ in range(2):
        model.step()
        model.gather()
    model.step()
    handle = model.group.gather(model.group.buckets[0])
    model.group.forget()
    handle.wait()
    known = model.group.buckets[0].base_known
    model.gather()
    return known, model.exact(), model.ledger.take(["raw_fallbacks/invalidated"])


def _unexpected_order(rank):
    """Buckets are gathered from the last to the first, all dispatched before any is waited for."""
    model = Model(*_buckets(2), warmup=1)
    results = []
    for _ in range(3):
        model.step()
        model.group.encode_ahead()
        handles = [model.group.gather(bucket) for bucket in reversed(model.group.buckets)]
        for handle in handles:
            handle.wait()
        results.append((model.exact(), model.ledger.take(["exchanges"])[0]))
    return results, model.group.memory["staging"], max(max(b.bounds) for b in model.group.buckets)


def _scenarios(rank):
    return {
        "hot step": _hot_step(rank),
        "hot piece": _hot_piece(rank),
        "invalidated": _invalidated(rank),
        "forgotten": _forgotten_on_the_way(rank),
        "order": _unexpected_order(rank),
    }


@pytest.fixture(scope="module")
def scenarios():
    return run_world(2, _scenarios)


def test_hot_step_is_exact_and_falls_back_on_all_ranks_alike(scenarios):
    first, second = (found["hot step"] for found in scenarios)
    assert all(exact for exact, *_ in first + second)
    assert [coded for _, coded, _ in first] == [coded for _, coded, _ in second]
    assert first[3][1] > 0 and first[1][1] > 0
    assert first[2][2] == 3 and second[2][2] == 0, "counted once a bucket, by one rank"


def test_piece_that_does_not_compress_goes_raw_alone(scenarios):
    first, second = (found["hot piece"] for found in scenarios)
    assert first[0] and second[0]
    assert first[1] == second[1] and first[1][1] and not any(first[1][2:])
    assert first[2] == [2, 2], "that bucket is coded in part; the bucket of 256 values is not"


def test_rewritten_weights_go_raw_once_after_they_were_declared(scenarios):
    for rank, (first, second) in enumerate(found["invalidated"] for found in scenarios):
        assert first == (True, 3 if rank == 0 else 0, 3)
        assert second == (True, 0, 1)  # the bucket of 256 values: a header costs more than it saves


def test_gather_under_way_proves_nothing_about_rewritten_weights(scenarios):
    for rank, (known, exact, fallbacks) in enumerate(found["forgotten"] for found in scenarios):
        assert not known and exact
        assert fallbacks == [3 if rank == 0 else 0]


def test_waves_of_an_unexpected_order_are_encoded_again_and_staging_holds(scenarios):
    for results, staging, largest in (found["order"] for found in scenarios):
        assert all(exact for exact, _ in results)
        assert results[0][1] == 0 and results[1][1] == results[2][1] > 0
        assert staging <= NUM_ARENAS * SMALL.wave_pieces * largest
