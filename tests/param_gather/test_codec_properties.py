"""Property-based round trips: any words, any sizes, any exponent block."""

import numpy as np
import pytest
import torch
from codec_cases import DTYPES, WORD, noise, round_trip, special_words, training_pair
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ciera.param_gather.codec import CODECS, make_codec

SETTINGS = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def word_pairs(draw):
    """Words before and after, mixed from training steps, noise, special values and stretches without a
    change."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.integers(0, 6000) | st.sampled_from((4093, 4099, 8191, 10007)))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    old, new = training_pair(size, dtype, learning_rate=10.0 ** draw(st.integers(-6, 0)), seed=seed)
    for source in draw(st.lists(st.sampled_from(("noise", "special", "same", "zero")), max_size=3)):
        where = rng.random(size) < draw(st.sampled_from((0.001, 0.1, 0.9)))
        replacement = {
            "noise": lambda: noise(size, dtype, seed + 1),
            "special": lambda: rng.choice(special_words(dtype), size),
            "same": lambda: old,  # noqa: B023
            "zero": lambda: np.zeros(size, WORD[dtype]),
        }[source]()
        new = np.where(where, replacement, new)
        if draw(st.booleans()):
            old = np.where(rng.random(size) < 0.5, replacement, old)
    return dtype, old, new


@pytest.mark.parametrize("coder", ("ans", "packed"))
@pytest.mark.parametrize("name", CODECS)
@SETTINGS
@given(pair=word_pairs(), block_bits=st.integers(4, 11))
def test_round_trip(name, coder, pair, block_bits):
    dtype, old, new = pair
    codec = make_codec(name, coder, dtype, 1 << block_bits)
    payload = round_trip(codec, old, new)
    assert payload.size <= 1.005 * new.nbytes + 192


def test_packed_wants_a_power_of_two_of_rows():
    for wrong in (8, 100, 8192):
        with pytest.raises(
            ValueError,
            match=f"--ciera-block-size {wrong}: on a GPU and with coder packed wanted a power of two",
        ):
            make_codec("exponent-reuse", "packed", torch.bfloat16, wrong)
