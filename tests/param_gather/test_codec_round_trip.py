"""Bit-exact round trips of every codec on CPU."""

import numpy as np
import pytest
import torch
from codec_cases import DTYPES, SIZES, noise, patterns, round_trip, to_words, training_pair

from megatron_ciera.param_gather.codec import CODECS, make_codec, new_flags

CODERS = ("ans", "packed")


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hard_patterns_of_all_sizes(name, coder, dtype):
    codec = make_codec(name, coder, dtype)
    for size in SIZES:
        for pattern, (old, new) in patterns(size, dtype).items():
            payload = round_trip(codec, old, new)
            if pattern == "unchanged" and name == "delta":
                assert payload.size <= 500 + 0.2 * new.nbytes


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_every_16_bit_word_against_varied_bases(name, coder, dtype):
    codec = make_codec(name, coder, dtype)
    table = np.arange(65536, dtype=np.uint16)
    for base in (
        np.zeros_like(table),
        table,
        table ^ np.uint16(0x8000),
        table + np.uint16(1),
        table[::-1].copy(),
        table * np.uint16(40503),
        np.full_like(table, 0x7FC1),
        np.full_like(table, 0xFFFF),
    ):
        round_trip(codec, base, table)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("block_size", (1, 7, 64, 513, 4096, 10000))
def test_block_sizes(name, block_size):
    codec = make_codec(name, "ans", torch.bfloat16, block_size)
    round_trip(codec, *training_pair(30011, torch.bfloat16))


@pytest.mark.parametrize("name", CODECS)
def test_state_follows_the_words(name):
    codec = make_codec(name, "ans", torch.bfloat16)
    old, new = training_pair(20000, torch.bfloat16)
    words = to_words(old)
    state = codec.new_state(words)
    words.copy_(to_words(new))
    codec.update_state(words, state)
    assert torch.equal(state, codec.new_state(to_words(new)))


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_incompressible_words_cost_at_most_half_a_percent(name, coder, dtype):
    codec = make_codec(name, coder, dtype)
    count = 100_003
    payload = round_trip(codec, noise(count, dtype, 1), noise(count, dtype, 2))
    assert payload.size <= 1.005 * count * codec.fmt.itemsize


@pytest.mark.parametrize("name", CODECS)
def test_encoding_is_deterministic(name):
    codec = make_codec(name, "ans", torch.bfloat16)
    old, new = training_pair(50000, torch.bfloat16)
    assert np.array_equal(round_trip(codec, old, new), round_trip(codec, old, new))


def test_many_segments_equal_one_by_one():
    codec = make_codec("delta", "ans", torch.bfloat16)
    pairs = [training_pair(size, torch.bfloat16, seed=size) for size in (5000, 0, 3, 70000)]
    outs = [torch.empty(codec.bound(old.size), dtype=torch.uint8) for old, _ in pairs]
    sizes = torch.empty(len(pairs), dtype=torch.int64)
    states = [codec.new_state(to_words(old)) for old, _ in pairs]
    codec.encode_many([to_words(new) for _, new in pairs], states, outs, sizes)
    targets = [to_words(old) for old, _ in pairs]
    flags = new_flags(len(pairs), "cpu")
    codec.decode_apply_many(
        [out[:size] for out, size in zip(outs, sizes.tolist(), strict=True)], targets, flags
    )
    assert flags[:, 0].sum() == 0
    for target, (old, new), out, size in zip(targets, pairs, outs, sizes.tolist(), strict=True):
        assert torch.equal(target, to_words(new))
        assert np.array_equal(round_trip(codec, old, new), out[:size].numpy())


def test_unknown_names_say_what_is_wanted():
    with pytest.raises(ValueError, match="wanted one of exponent-reuse, delta"):
        make_codec("lz4", "ans", torch.bfloat16)
    with pytest.raises(ValueError, match="wanted one of auto, ans, packed"):
        make_codec("delta", "rans", torch.bfloat16)
    with pytest.raises(ValueError, match="torch.bfloat16, torch.float16 or torch.float32"):
        make_codec("delta", "ans", torch.float64)
