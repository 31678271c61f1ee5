"""Selection: gains, budgets and decisions, as pure arithmetic and in a running group."""

from unittest.mock import patch

import pytest
import torch

from megatron_ciera.param_gather import decider as decider_module
from megatron_ciera.param_gather.bucket import RAW
from megatron_ciera.param_gather.decider import Policy
from megatron_ciera.param_gather.layout import ClassRun, cut_bucket, piece_lengths
from megatron_ciera.param_gather.pieces import (
    EXPECTED_RATIO,
    choose_piece_values,
    predict_seconds,
    wave_counts,
)
from megatron_ciera.param_gather.selection import (
    ClassStats,
    Costs,
    Curve,
    choose,
    drifted,
    format_table,
    gains,
    rows,
)
from tests.param_gather.gather_world import Model, run_world

RUNS = [ClassRun(0, 1 << 20, "expert"), ClassRun(1 << 20, 1 << 21, "norm")]
PIECES = cut_bucket(1 << 21, 2, RUNS, 1 << 30)
EXPERT, NORM = PIECES[0].segments[0][0], PIECES[0].segments[1][0]
CODECS = ("delta", "exponent-reuse")


def stats(delta: float, reuse: float, values: int = 1 << 16) -> ClassStats:
    """Statistics of a class that takes so many bits a value."""
    coded = {"delta": int(delta * values / 8), "exponent-reuse": int(reuse * values / 8)}
    return ClassStats(values, values // 2, values // 50, values // 512, values // 1024, coded)


def costs(gb_s: float, codec_gb_s: float = 1000.0) -> Costs:
    """A link and codecs of constant speed, in raw bytes of bf16."""
    link = Curve((1e3, 1e9), (1e3 / gb_s / 1e9, 1 / gb_s))
    codec = Curve((1e3, 1e9), (2e3 / codec_gb_s / 1e9, 2 / codec_gb_s))
    return Costs(link, dict.fromkeys(CODECS, codec), dict.fromkeys(CODECS, codec), 1e-5)


STATS = {"expert": stats(3.0, 10.6), "norm": stats(0.5, 8.1)}
STATE = {(codec, 1 << 20): {"delta": 1 << 21, "exponent-reuse": 1 << 15}[codec] for codec in CODECS}


def decide(measured, budgets=(None, None), select=True, overhead=0.0):
    return choose(PIECES, measured, STATE, budgets, select, overhead)


def test_curve_reads_between_and_beyond_its_points():
    curve = Curve((100.0, 200.0, 400.0), (1.0, 2.0, 6.0))
    assert [curve(size) for size in (50, 100, 150, 300, 600)] == [1.0, 1.0, 1.5, 4.0, 10.0]


def test_pieces_are_few_where_a_gather_takes_long_to_start_and_more_where_coding_does():
    def pieces(latency: float, codec_gb_s: float) -> int:
        link = Curve((1e4, 1e9), (latency, latency + 1e9 / 25e9))
        codec = Curve((1e4, 1e9), (5e-5, 5e-5 + 2e9 / (codec_gb_s * 1e9)))
        measured = Costs(link, dict.fromkeys(CODECS, codec), dict.fromkeys(CODECS, codec), 1e-4, True)
        values = choose_piece_values(1 << 27, 1 << 27, 2, 2, "delta", measured, 2, 2)
        return len(piece_lengths(1 << 27, values))

    assert pieces(1e-2, 1000) == 1
    assert 3 <= pieces(1e-4, 1000) < pieces(2e-5, 100)


@pytest.mark.parametrize("num_slots, wanted", [(1, 10.0), (2, 8.0), (3, 8.0)])
def test_receive_buffers_let_the_wire_run_beside_the_decoder(num_slots, wanted):
    """Three pieces, 1 s to encode, 2 s on the wire and 1 s to decode; what issues them takes nothing."""

    def seconds(each: float) -> Curve:
        return Curve((0.0, 1.0), (0.0, each))

    measured = Costs(seconds(2.0), {"delta": seconds(1.0)}, {"delta": seconds(1.0)}, 0.0, True)
    lengths, ranks, itemsize = [1, 1, 1], 2, 1 / EXPECTED_RATIO["delta"]
    assert predict_seconds(lengths, itemsize, ranks, "delta", measured, num_slots, 1) == pytest.approx(wanted)


@pytest.mark.parametrize("wave_pieces, wanted", [(1, [1, 1, 1, 1, 1]), (2, [1, 2, 2]), (4, [1, 2, 2])])
def test_first_wave_is_one_piece(wave_pieces, wanted):
    assert list(wave_counts(piece_lengths(1 << 27, 1 << 25), wave_pieces)) == wanted


def test_gain_is_the_papers_formula():
    measured = gains(PIECES, STATS, CODECS, 2, costs(10))
    raw, payload, codec = 2 * 2**20 / 10e9, 3 / 8 * 2**20 / 10e9, 2 * 2 * 2**20 / 1000e9
    assert measured[EXPERT]["delta"] == pytest.approx(raw - payload - codec)


def test_without_costs_gains_are_bytes():
    assert gains(PIECES, STATS, CODECS, 2, None)[EXPERT]["delta"] == 2**20 * (2 - 3 / 8)


def test_slow_link_compresses_fast_link_stays_raw():
    assert decide(gains(PIECES, STATS, CODECS, 2, costs(10)))[EXPERT] == "delta"
    assert set(decide(gains(PIECES, STATS, CODECS, 2, costs(5000))).values()) == {RAW}


def test_without_selection_everything_measured_is_compressed():
    assert RAW not in decide(gains(PIECES, STATS, CODECS, 2, costs(5000)), select=False).values()


def test_class_that_was_not_measured_stays_raw():
    measured = gains(PIECES, {"expert": STATS["expert"], "norm": ClassStats()}, CODECS, 2, None)
    assert (decide(measured)[EXPERT], decide(measured)[NORM]) == ("delta", RAW)


def test_gains_that_do_not_pay_for_the_exchange_leave_all_raw():
    measured = gains(PIECES, STATS, CODECS, 2, costs(10))
    assert set(decide(measured, overhead=1.0).values()) == {RAW}


def test_budget_is_kept_on_each_rank_by_gain_per_byte():
    runs = [
        ClassRun(0, 1 << 19, "norm"),
        ClassRun(1 << 19, 1 << 20, "expert"),
        ClassRun(1 << 20, 1 << 21, "expert"),
    ]
    pieces = cut_bucket(1 << 21, 2, runs, 1 << 30)
    measured = gains(pieces, STATS, ("delta",), 2, None)
    state = {("delta", 1 << 19): 1 << 20, ("delta", 1 << 20): 1 << 21}
    chosen = choose(pieces, measured, state, (1 << 20, 0), True)
    first, second = pieces[0].segments
    assert [chosen[segment] for segment in first] == ["delta", RAW]  # norms gain more for each byte of memory
    assert [chosen[segment] for segment in second] == [RAW]


def test_drift_is_relative_and_ignores_absent_classes():
    assert not drifted(STATS, {"expert": stats(3.2, 10.6), "norm": ClassStats()}, CODECS, 0.1)
    assert drifted(STATS, {"expert": stats(2.6, 10.6)}, CODECS, 0.1)
    assert not drifted({}, STATS, CODECS, 0.1)


def test_table_names_class_rate_ratio_and_codec():
    measured = gains(PIECES, STATS, CODECS, 2, None)
    choices = decide(measured) | {NORM: RAW}
    decision = decider_module.Decision(choices, rows(choices, measured, STATS, 2), False)
    lines = format_table("test", decision)
    assert lines[2].split()[:6] == ["expert", "1", "1", "2.00%", "50.00%", "0.188"]
    # Of two ranks one sends 2^20 values of 3 instead of 16 bits.
    assert float(lines[2].split()[6]) == pytest.approx(2**20 * 13 / 8 / 2 / 1e3, abs=0.1)
    assert lines[2].endswith("delta") and lines[3].endswith("raw")


COUNTS = [128 * 2 * 301, 128 * 2 * 97]
SPLIT = [[ClassRun(0, count // 2, "expert"), ClassRun(count // 2, count, "embedding")] for count in COUNTS]


def _policy(budget=None, codecs=CODECS, select=True) -> Policy:
    return Policy(codecs, select, budget, warmup_steps=2, block_size=512)


def _auto(rank):
    """Learning rate falls from one at which delta does not pay to one at which it does."""
    with patch.object(decider_module, "PROBE_INTERVAL", 4):
        return _falling_rate()


def _falling_rate():
    model = Model(COUNTS, SPLIT, codec=RAW, warmup=2, policy=_policy(codecs=("delta",)))
    seen = []
    for step in range(1, 14):
        model.step(1e4 if step < 6 else 1e-4)
        if step % 2:
            model.group.encode_ahead()
        model.gather_overlapped()
        kinds = {own.codec for bucket in model.group.buckets for own in bucket.own}
        seen.append((model.exact(), tuple(sorted(kinds)), *model.ledger.take(["exchanges", "bytes_sent"])))
    return seen, model.log


def test_selection_follows_the_change_rate_without_an_exchange_of_its_own():
    (first, log), (second, _) = run_world(2, _auto)
    assert [step[:3] for step in first] == [step[:3] for step in second]
    assert all(exact for exact, *_ in first)
    assert first[4][1] == (RAW,), "steps that do not compress stay raw"
    assert first[4][2] == 0, "nothing compressed: nothing to exchange"
    assert first[-1][1] == ("delta",)
    assert [step[2] for step in first[:2]] == [1, 1], "a step of the warm-up exchanges its counts"
    assert first[11][2] == first[12][2] > 0, "a step that is measured exchanges no more often than another"
    assert first[-1][3] < first[4][3] / 2
    assert sum("selection, test" in line for line in log) == 2


def _budgeted(rank):
    model = Model(COUNTS, SPLIT, codec=RAW, warmup=1, policy=_policy(budget=20000 if rank else 60000))
    for _ in range(4):
        model.step()
        model.gather()
    return model.exact(), model.group.memory["state"], model.ledger.take(["raw_fallbacks/incompressible"])


def test_budget_of_each_rank_holds():
    (exact_0, state_0, _), (exact_1, state_1, _) = run_world(2, _budgeted)
    assert exact_0 and exact_1
    assert 0 < state_1 <= 20000 < state_0 <= 60000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_probe_counts_what_changed(dtype):
    from megatron_ciera.param_gather.codec import as_words, make_codec
    from megatron_ciera.param_gather.probe import Probe

    values = torch.linspace(1.0, 1.9, 2048).to(dtype)
    codecs = {name: make_codec(name, "auto", dtype, 512) for name in CODECS}
    probe = Probe([("expert", as_words(values))], ["attention", "expert"], codecs, dtype, 512)
    probe.remember()
    values[:3] *= 4.0  # three exponents, in one block
    values[600] += 2**-6  # a mantissa alone
    counts = torch.empty(probe.num_counts, dtype=torch.int64)
    probe.measure(counts)
    found = probe.stats(torch.stack([counts, counts]))
    assert found["attention"].values == 0
    expert = found["expert"]
    assert (expert.values, expert.same, expert.exponent_changed) == (4096, 2 * 2044, 6)
    assert (expert.blocks, expert.blocks_changed) == (8, 2)
    assert expert.bytes_per_value("delta") < expert.bytes_per_value("exponent-reuse")
