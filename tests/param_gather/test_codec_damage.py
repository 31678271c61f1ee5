"""Damaged payloads and diverged bases are noticed block by block, and nothing wrong is stored."""

import numpy as np
import pytest
import torch
from codec_cases import DTYPES, damaged, round_trip, to_words, training_pair

from megatron_ciera.param_gather.codec import CODECS, HASH_BLOCK, NO_BAD_BLOCK, make_codec, new_flags

CODERS = ("ans", "packed")


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_damaged_payloads_are_flagged_before_anything_is_stored(name, coder, dtype):
    codec = make_codec(name, coder, dtype)
    old, new = training_pair(18_000, dtype)
    before, after = to_words(old).split(HASH_BLOCK), to_words(new).split(HASH_BLOCK)
    noticed = 0
    for payload in damaged(round_trip(codec, old, new)):
        target, flags = to_words(old), new_flags(1, "cpu")
        codec.decode_apply(torch.from_numpy(payload), target, flags)
        bad = [
            not torch.equal(got, right) for got, right in zip(target.split(HASH_BLOCK), after, strict=True)
        ]
        # A flipped bit may be one that no decoder uses: what counts is that wrong words are never stored.
        assert sum(bad) == int(flags[0, 0])
        assert int(flags[0, 1]) == (bad.index(True) if any(bad) else NO_BAD_BLOCK)
        noticed += any(bad)
        for got, kept, is_bad in zip(target.split(HASH_BLOCK), before, bad, strict=True):
            assert not is_bad or torch.equal(got, kept)
    assert noticed > 18


@pytest.mark.parametrize("coder", CODERS)
def test_a_diverged_base_is_found_in_its_block_only(coder):
    codec = make_codec("delta", coder, torch.bfloat16)
    old, new = training_pair(5 * HASH_BLOCK, torch.bfloat16)
    payload = torch.from_numpy(round_trip(codec, old, new))
    target, flags = to_words(old), new_flags(1, "cpu")
    target[2 * HASH_BLOCK + 17] += 1
    diverged = target.clone()
    codec.decode_apply(payload, target, flags)
    assert flags.tolist() == [[1, 2]]
    part = slice(2 * HASH_BLOCK, 3 * HASH_BLOCK)
    assert torch.equal(target[part], diverged[part])
    assert torch.equal(target[: part.start], to_words(new)[: part.start])
    assert torch.equal(target[part.stop :], to_words(new)[part.stop :])


@pytest.mark.parametrize("coder", CODERS)
def test_payloads_of_another_codec_dtype_or_length_are_refused_whole(coder):
    old, new = training_pair(3 * HASH_BLOCK, torch.bfloat16)
    codec = make_codec("delta", coder, torch.bfloat16)
    payload = torch.from_numpy(round_trip(codec, old, new))
    others = [
        (make_codec("delta", coder, torch.float16), old),
        (make_codec("exponent-reuse", coder, torch.bfloat16), old),
        (make_codec("delta", coder, torch.bfloat16, 256), old),
        (make_codec("delta", {"ans": "packed", "packed": "ans"}[coder], torch.bfloat16), old),
        (codec, old[:-1].copy()),
    ]
    for other, base in others:
        target, flags = to_words(base), new_flags(1, "cpu")
        other.decode_apply(payload, target, flags)
        assert flags.tolist() == [[-(-base.size // HASH_BLOCK), 0]]
        assert torch.equal(target, to_words(base))


def test_flags_gather_over_calls():
    codec = make_codec("delta", "ans", torch.bfloat16)
    old, new = training_pair(3 * HASH_BLOCK, torch.bfloat16)
    payload = torch.from_numpy(round_trip(codec, old, new))
    flags = new_flags(1, "cpu")
    assert flags.tolist() == [[0, NO_BAD_BLOCK]]
    for place in (2 * HASH_BLOCK, HASH_BLOCK):
        target = to_words(old)
        target[place] ^= 1
        codec.decode_apply(payload, target, flags)
    assert flags.tolist() == [[2, 1]]


def test_bytes_behind_the_reported_size_mean_nothing():
    codec = make_codec("delta", "packed", torch.bfloat16)
    old, new = training_pair(9000, torch.bfloat16)
    payload = round_trip(codec, old, new)
    longer = torch.from_numpy(np.concatenate([payload, np.full(999, 0xEE, np.uint8)]))
    target, flags = to_words(old), new_flags(1, "cpu")
    codec.decode_apply(longer, target, flags)
    assert flags[0, 0] == 0 and torch.equal(target, to_words(new))
