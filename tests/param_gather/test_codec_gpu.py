"""The kernels on a GPU: parity with the plain-torch twins, damage, many segments, no host synchronisation."""

import numpy as np
import pytest
import torch
from codec_cases import DTYPES, damaged, noise, patterns, round_trip, to_words, training_pair

from megatron_ciera.param_gather.codec import CODECS, HASH_BLOCK, make_codec, new_flags

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def coders() -> tuple[str, ...]:
    try:
        make_codec("delta", "ans", torch.bfloat16, device="cuda")
    except (ValueError, ImportError, OSError):
        return ("packed",)
    return ("packed", "ans")


CODERS = coders() if torch.cuda.is_available() else ("packed",)


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hard_patterns_of_all_sizes(name, coder, dtype):
    codec = make_codec(name, coder, dtype, device="cuda")
    twin = make_codec(name, "packed", dtype)
    for size in (0, 1, 511, 513, 4096, 4099, 300_007):
        for pattern, (old, new) in patterns(size, dtype).items():
            payload = torch.from_numpy(round_trip(codec, old, new))
            if coder == "packed" and size < 5000:  # what a GPU wrote, the CPU twin reads
                target, flags = to_words(old), new_flags(1, "cpu")
                twin.decode_apply(payload, target, flags)
                assert flags[0, 0] == 0 and torch.equal(target, to_words(new)), pattern
                assert payload.numel() == round_trip(twin, old, new).size, pattern


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_every_16_bit_word_against_varied_bases(name, coder, dtype):
    codec = make_codec(name, coder, dtype, device="cuda")
    table = np.arange(65536, dtype=np.uint16)
    for base in (
        np.zeros_like(table),
        table,
        table ^ np.uint16(0x8000),
        table[::-1].copy(),
        table * np.uint16(40503),
    ):
        round_trip(codec, base, table)


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", CODECS)
def test_damage_is_flagged_before_anything_is_stored(name, coder):
    codec = make_codec(name, coder, torch.bfloat16, device="cuda")
    old, new = training_pair(20_000, torch.bfloat16)
    for payload in damaged(round_trip(codec, old, new)):
        target, flags = to_words(old).cuda(), new_flags(1, "cuda")
        codec.decode_apply(torch.from_numpy(payload).cuda(), target, flags)
        blocks = zip(
            target.cpu().split(HASH_BLOCK),
            to_words(old).split(HASH_BLOCK),
            to_words(new).split(HASH_BLOCK),
            strict=True,
        )
        decoded = 0
        for got, before, after in blocks:
            decoded += torch.equal(got, after)
            assert torch.equal(got, before) or torch.equal(got, after)
        assert decoded + int(flags[0, 0]) == -(-20_000 // HASH_BLOCK)


@pytest.mark.parametrize("coder", CODERS)
@pytest.mark.parametrize("name", CODECS)
def test_many_segments_without_host_synchronisation(name, coder):
    codec = make_codec(name, coder, torch.bfloat16, device="cuda")
    pairs = [training_pair(size, torch.bfloat16, seed=size) for size in (50_000, 3, 4096, 700_001, 0)]
    new = [to_words(pair[1]).cuda() for pair in pairs]
    states = [codec.new_state(to_words(pair[0]).cuda()) for pair in pairs]
    outs = [torch.empty(codec.bound(words.numel()), dtype=torch.uint8, device="cuda") for words in new]
    sizes = torch.empty(len(pairs), dtype=torch.int64, device="cuda")
    for attempt in range(2):  # the first one compiles and allocates
        targets, flags = [to_words(pair[0]).cuda() for pair in pairs], new_flags(len(pairs), "cuda")
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            codec.encode_many(new, states, outs, sizes)
            codec.decode_apply_many(outs, targets, flags)
            codec.update_state(new[0], states[0].clone())
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert flags[:, 0].sum() == 0
        assert all(torch.equal(target, words) for target, words in zip(targets, new, strict=True))


@pytest.mark.parametrize("coder", CODERS)
def test_words_that_are_not_aligned(coder):
    codec = make_codec("delta", coder, torch.bfloat16, device="cuda")
    old, new = training_pair(9001, torch.bfloat16)
    words, base = to_words(new).cuda()[1:], to_words(old).cuda()[1:]
    out = torch.empty(codec.bound(9000), dtype=torch.uint8, device="cuda")
    size, flags = torch.empty(1, dtype=torch.int64, device="cuda"), new_flags(1, "cuda")
    codec.encode(words, base, out, size)
    codec.decode_apply(out[: int(size)], base, flags)
    assert flags[0, 0] == 0 and torch.equal(base, words)


def test_large_chunks_and_several_of_them():
    for coder in CODERS:
        codec = make_codec("delta", coder, torch.bfloat16, device="cuda")
        count = (1 << 25) + 12_345
        old = torch.randint(0x3C00, 0x3C40, (count,), dtype=torch.int16, device="cuda")
        new = old + torch.randint(-3, 4, (count,), dtype=torch.int16, device="cuda")
        new[::1000] = torch.randint(-(2**15), 2**15, (new[::1000].numel(),), dtype=torch.int16, device="cuda")
        out = torch.empty(codec.bound(count), dtype=torch.uint8, device="cuda")
        size, flags = torch.empty(1, dtype=torch.int64, device="cuda"), new_flags(1, "cuda")
        codec.encode(new, codec.new_state(old), out, size)
        codec.decode_apply(out[: int(size)], old, flags)
        assert flags[0, 0] == 0 and torch.equal(old, new)
        assert int(size) < count  # entropy of seven differences, a thousandth of them escapes


@pytest.mark.skipif("ans" not in CODERS, reason="needs nvCOMP")
@pytest.mark.parametrize("name", CODECS)
def test_incompressible_words_cost_at_most_half_a_percent(name):
    codec = make_codec(name, "ans", torch.bfloat16, device="cuda")
    payload = round_trip(codec, noise(300_007, torch.bfloat16, 1), noise(300_007, torch.bfloat16, 2))
    assert payload.size <= 1.005 * 2 * 300_007


@pytest.mark.parametrize("name", CODECS)
def test_more_than_two_to_the_31_values(name):
    codec = make_codec(name, "packed", torch.bfloat16, device="cuda")
    count = 2**31 + 4097
    old = torch.randint(0x3C00, 0x3C40, (count,), dtype=torch.int16, device="cuda")
    new = old + torch.randint(-1, 2, (count,), dtype=torch.int16, device="cuda")
    state = codec.new_state(old)
    out = torch.empty(codec.bound(count), dtype=torch.uint8, device="cuda")
    size, flags = torch.empty(1, dtype=torch.int64, device="cuda"), new_flags(1, "cuda")
    codec.encode(new, state, out, size)
    codec.decode_apply(out[: int(size)], old, flags)
    assert flags[0, 0] == 0 and torch.equal(old, new)
    assert int(size) < codec.bound(count)
