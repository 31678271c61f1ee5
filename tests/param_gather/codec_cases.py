"""Hard inputs for codecs, as named pairs (old words, new words), and the round trip that every codec must
survive."""

import numpy as np
import torch

from megatron_ciera.param_gather.codec import new_flags

SIZES = (0, 1, 2, 511, 512, 513, 4095, 4096, 4097, 8191, 12289)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORD = {torch.bfloat16: np.uint16, torch.float16: np.uint16, torch.float32: np.uint32}


def to_words(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy().view({2: np.int16, 4: np.int32}[array.itemsize]))


def noise(count: int, dtype: torch.dtype, seed: int = 0) -> np.ndarray:
    """Every word equally likely."""
    return np.random.default_rng(seed).integers(
        0, 2 ** (8 * WORD[dtype]().itemsize), count, dtype=WORD[dtype]
    )


def training_pair(count: int, dtype: torch.dtype, learning_rate: float = 3e-4, seed: int = 0):
    """Words of Gaussian weights before and after one Adam-like step."""
    rng = np.random.default_rng(seed)
    before = torch.from_numpy(rng.normal(0, 0.02, count))
    after = before + torch.from_numpy(learning_rate * rng.normal(0, 0.5, count))
    view = {2: torch.int16, 4: torch.int32}[WORD[dtype]().itemsize]
    return tuple(x.to(dtype).view(view).numpy().view(WORD[dtype]) for x in (before, after))


def special_words(dtype: torch.dtype) -> np.ndarray:
    """±0, smallest and largest denormals, ±Inf, quiet and signalling NaNs with payloads, extremes of the
    word."""
    if dtype is torch.bfloat16:
        words = [
            0x0000,
            0x8000,
            0x0001,
            0x8001,
            0x007F,
            0x807F,
            0x7F80,
            0xFF80,
            0x7FC0,
            0xFFC1,
            0x7F81,
            0x7FFF,
            0xFFFF,
        ]
    elif dtype is torch.float16:
        words = [
            0x0000,
            0x8000,
            0x0001,
            0x8001,
            0x03FF,
            0x83FF,
            0x7C00,
            0xFC00,
            0x7E00,
            0xFE01,
            0x7C01,
            0x7FFF,
            0xFFFF,
        ]
    else:
        words = [
            0,
            0x80000000,
            1,
            0x80000001,
            0x7FFFFF,
            0x807FFFFF,
            0x7F800000,
            0xFF800000,
            0x7FC00000,
            0xFFC00001,
            0x7F800001,
            0x7FFFFFFF,
            0xFFFFFFFF,
            0x0000FFFF,
            0xFFFF0000,
        ]
    return np.array(words, WORD[dtype])


def patterns(count: int, dtype: torch.dtype) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    word = WORD[dtype]
    special = special_words(dtype)
    rng = np.random.default_rng(5)
    old, new = training_pair(count, dtype)
    hot_old, hot_new = training_pair(count, dtype, learning_rate=0.5)
    return {
        "training": (old, new),
        "hot step": (hot_old, hot_new),
        "unchanged": (old, old.copy()),
        "all equal": (np.full(count, 0x3C12, word), np.full(count, 0x3C13, word)),
        "all zero": (np.zeros(count, word), np.zeros(count, word)),
        "zero to minus zero": (
            np.zeros(count, word),
            np.full(count, word(1) << word(8 * word().itemsize - 1), word),
        ),
        "all different": (noise(count, dtype, 1), ~noise(count, dtype, 1)),
        "noise": (noise(count, dtype, 1), noise(count, dtype, 2)),
        "special": (rng.choice(special, count), rng.choice(special, count)),
        "training with specials": (old, np.where(rng.random(count) < 0.01, rng.choice(special, count), new)),
    }


def round_trip(codec, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Encode new against old, cut to the reported size, decode into old's words; asserts bit equality.

    Returns the payload. The output buffer starts out poisoned, and so is what lies beyond the reported size.
    """
    device = codec.device
    old_words, new_words = to_words(old).to(device), to_words(new).to(device)
    state = codec.new_state(old_words)
    assert state.numel() * state.element_size() == codec.state_bytes(old.size)
    guarded = torch.full((codec.bound(new.size) + 4096,), 0xA5, dtype=torch.uint8, device=device)
    out = guarded[: codec.bound(new.size)]
    size = torch.full((1,), -1, dtype=torch.int64, device=device)
    codec.encode(new_words, state, out, size)
    assert 0 < int(size) <= out.numel()
    assert (guarded[out.numel() :] == 0xA5).all(), "bytes behind the output were written"
    payload = out[: int(size)].clone()
    target = old_words.clone()
    flags = new_flags(1, device)
    codec.decode_apply(payload, target, flags)
    assert flags[0, 0] == 0, f"bad blocks reported: {flags.tolist()}"
    assert torch.equal(target, new_words)
    return payload.cpu().numpy()


def damaged(payload: np.ndarray, seed: int = 0, count: int = 8):
    """Damaged copies of a payload that must all be noticed: cut short, bits flipped everywhere, garbage
    behind the header, another payload's header."""
    rng = np.random.default_rng(seed)
    for end in (0, 1, 63, 64, 80, payload.size // 4 * 2, payload.size - 16):
        yield payload[: max(end, 0)].copy()
    front = 64 + 12  # header fields that a decoder does not need (the size) may be anything
    for place in np.concatenate([[0, 4, 5, 6, 7, 8, 64, 68], rng.integers(front, payload.size - 16, count)]):
        changed = payload.copy()
        changed[place] ^= np.uint8(1 << rng.integers(8))
        yield changed
    for start in (64, 84, 200, payload.size // 2):
        changed = payload.copy()
        changed[start:] = rng.integers(0, 256, payload.size - start, dtype=np.uint8)
        yield changed
