"""Faults put in on purpose: each ends in the same clear stop on every rank, or in a raw gather; never in drift."""

from unittest.mock import patch

import pytest
import torch

from megatron_ciera.errors import ConfigurationError
from megatron_ciera.param_gather import codec_choice
from megatron_ciera.param_gather.errors import ParamGatherError
from megatron_ciera.param_gather.layout import ClassRun
from tests.param_gather.gather_world import Model, run_world

RUNS = [[ClassRun(0, 40960, "expert")], [ClassRun(0, 30000, "attention"), ClassRun(30016, 40960, "expert")]]
SIZES = [40960, 40960]


def _trained(codec="delta") -> Model:
    model = Model(SIZES, RUNS, codec=codec, warmup=1)
    for _ in range(2):
        model.step()
        model.gather()
    assert model.exact()
    return model


def _outcome(run) -> str:
    """The text of the ParamGatherError that `run` raises."""
    try:
        run()
    except ParamGatherError as error:
        return str(error)
    return "nothing was raised"


def _next_step(model: Model) -> str:
    model.step()
    return _outcome(model.gather)


def _corrupt_payload(rank):
    model = _trained()
    bucket, pack = model.group.buckets[1], model.group.buckets[1].pack

    def corrupted(piece, region):
        pack(piece, region)
        region[region.numel() // 2 :] ^= 0x5A

    if rank == 1:
        bucket.pack = corrupted
    first = _next_step(model)
    before_save = _outcome(model.group.check_damage)
    bucket.pack = pack
    return first, before_save, _next_step(model)


def _corrupt_header(rank):
    model = _trained("exponent-reuse")
    bucket, pack = model.group.buckets[0], model.group.buckets[0].pack

    def corrupted(piece, region):
        pack(piece, region)
        region[:4] = 0

    if rank == 0:
        bucket.pack = corrupted
    model.step()
    model.gather()
    return _outcome(model.group.check_damage)


def _skipped_shadow(rank):
    model = _trained()
    if rank == 0:
        model.group.buckets[0].adopt = lambda: None
    model.step()
    model.gather()
    exact_before = model.exact()
    _next_step(model)
    return exact_before, _outcome(model.group.check_damage)


def _edited_parameters(rank):
    model = _trained()
    model.values[0][1000:1100] += 1.0  # weight surgery on every rank, undeclared
    model.step()
    model.gather()
    return _outcome(model.group.check_damage)


def _other_decision(rank):
    model = _trained()
    if rank == 1:
        bucket = model.group.buckets[0]
        bucket.choose(lambda segment: "exponent-reuse")
        bucket.adopt()
    held = [values.clone() for values in model.values]
    outcome = _next_step(model)
    foreign = slice(20480, None) if rank == 0 else slice(0, 20480)
    return outcome, all((a[foreign] == b[foreign]).all() for a, b in zip(held, model.values, strict=True))


def _lost_step(rank):
    model = _trained()
    if rank == 1:
        model.group.steps -= 1
    return _next_step(model)


def _late_edit(rank):
    model = _trained()
    model.step()
    model.group.encode_ahead()
    if rank == 0:
        model.values[0][:8] = 7.0  # between step and gather, on the owner alone
    model.group.verify = True
    return _outcome(model.gather)


def _faults(rank):
    return {
        "payload": _corrupt_payload(rank),
        "header": _corrupt_header(rank),
        "shadow": _skipped_shadow(rank),
        "edited": _edited_parameters(rank),
        "decision": _other_decision(rank),
        "step": _lost_step(rank),
        "late": _late_edit(rank),
    }


@pytest.fixture(scope="module")
def outcomes():
    return run_world(2, _faults)


def both(outcomes, name):
    """What the two ranks saw; they must have seen the same."""
    first, second = (found[name] for found in outcomes)
    assert first == second
    return first


def test_corrupt_payload_stops_at_the_next_exchange_and_before_a_save(outcomes):
    at_gather, before_save, at_next = both(outcomes, "payload")
    assert at_gather == "nothing was raised"  # found while decoding, told at the next exchange
    for text in (before_save, at_next):
        assert "gathered parameters differ from what their owner sent" in text
        assert "rank 0 of the group has" in text and "rank 1" not in text.split("bad blocks")[0]
        assert "bucket 1, " in text and "of rank 1's shard, block" in text


def test_corrupt_header_counts_as_all_blocks(outcomes):
    text = both(outcomes, "header")
    assert (
        "rank 1 of the group has" in text
        and "bucket 0, expert values from 0 of rank 0's shard, block 0" in text
    )


def test_skipped_shadow_is_found_by_the_block_hashes(outcomes):
    exact_before, text = both(outcomes, "shadow")
    assert exact_before
    assert "rank 1 of the group has" in text and "bucket 0" in text


def test_edited_parameters_stop_with_the_way_out(outcomes):
    text = both(outcomes, "edited")
    assert "weights_changed()" in text and "rank 1 of the group has" in text


def test_rank_that_decides_differently_stops_all_before_any_payload_moves(outcomes):
    text, untouched = both(outcomes, "decision")
    assert "differ in what they are about to gather" in text and "Nothing was sent" in text
    assert untouched


def test_step_counters_are_compared(outcomes):
    assert "differ in the number of optimizer steps: rank 0 has 3, rank 1 has 2" in both(outcomes, "step")


def test_verification_finds_what_no_hash_can(outcomes):
    text = both(outcomes, "late")
    assert "--ciera-verify-interval: bucket 0 differs from a raw gather: 8 values of rank 0's shard" in text


def _failing_coder(rank, coder, names):
    real = codec_choice.make_codec

    def failing(name, coder, *args):
        if rank == 1 and coder != "packed" and name in names:
            raise OSError("libnvcomp.so.5: cannot open shared object file")
        return real(name, coder, *args)

    try:
        with patch.object(codec_choice, "make_codec", failing):
            codecs, notes = codec_choice.agree_on_codecs(
                "auto", coder, True, torch.bfloat16, 512, torch.device("cpu")
            )
    except ConfigurationError as error:
        return str(error)
    return sorted((name, codec.coder_name) for name, codec in codecs.items()), notes


def test_coder_that_fails_on_one_rank_is_used_by_none():
    first, second = run_world(2, _failing_coder, "auto", ("delta", "exponent-reuse"))
    assert first == second
    codecs, notes = first
    assert ("delta", "packed") in codecs
    assert any("rank 1: OSError: libnvcomp.so.5" in note for note in notes)


def test_codec_that_fails_on_one_rank_leaves_the_other():
    first, second = run_world(2, _failing_coder, "auto", ("exponent-reuse",))
    assert first == second
    assert first[0] == [("delta", "ans")]


def test_coder_asked_for_by_name_stops_every_rank():
    first, second = run_world(2, _failing_coder, "ans", ("delta", "exponent-reuse"))
    assert first == second
    assert "--ciera-coder ans: no codec works on every rank" in first and "rank 1: OSError" in first
