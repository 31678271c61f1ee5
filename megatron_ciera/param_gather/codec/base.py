"""The contract of every codec. A codec turns a segment's new words into a payload and applies it elsewhere in
place.

Vocabulary. A *segment* is a contiguous 1-D tensor of words (int16 for bf16 and fp16, int32 for fp32; see
``words.as_words``). Its *base* is what it held when it was last gathered. Receivers hold the base in the
destination itself, which is decoded in place; the sender keeps a *state* made from the base when that gather
completed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from .container import payload_bound
from .words import word_format

NO_BAD_BLOCK = 2**31 - 1


def new_flags(count: int, device: torch.device | str) -> torch.Tensor:
    """Fresh damage flags for ``count`` payloads: int32 [count, 2] = (bad hash blocks, index of the first
    one).

    Decoding only ever adds to column 0 and lowers column 1, so flags may be kept over many calls and read
    late.
    """
    flags = torch.zeros(count, 2, dtype=torch.int32, device=device)
    flags[:, 1] = NO_BAD_BLOCK
    return flags


class Codec(ABC):
    """One codec with one entropy coder, for one parameter dtype on one kind of device.

    All methods run on the current stream of ``device`` and never wait for it: sizes and flags stay in device
    memory. On a GPU the ``*_many`` forms take a number of kernel launches that does not depend on how many
    segments there are. Instances hold no state of a segment; ``new_state`` returns it and the caller keeps
    it.
    """

    name: str  # 'exponent-reuse' or 'delta'
    coder_name: str  # 'ans' or 'packed'

    def __init__(self, dtype: torch.dtype, block_size: int, device: torch.device):
        self.fmt = word_format(dtype)
        self.dtype = dtype
        self.block_size = block_size
        self.device = device

    def bound(self, num_values: int) -> int:
        """Bytes that ``out`` must have to encode this many values; a multiple of 16, and what raw mode
        costs."""
        return payload_bound(num_values, self.fmt)

    @abstractmethod
    def state_bytes(self, num_values: int) -> int:
        """Bytes of the state of a segment of this many values, as kept on the sender."""

    @abstractmethod
    def new_state(self, words: torch.Tensor) -> torch.Tensor:
        """The state for the words as they are now, to be taken when every receiver holds exactly these
        words."""

    @abstractmethod
    def update_state(self, words: torch.Tensor, state: torch.Tensor) -> None:
        """Bring ``state`` to the words as they are now, in place and without allocating a second state."""

    @abstractmethod
    def encode_many(
        self,
        words: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        sizes: torch.Tensor,
    ) -> None:
        """Encode each segment against its state.

        ``outs[i]``: uint8, at least ``bound(len(words[i]))`` bytes, 16-byte aligned. ``sizes``: int64 [n] on
        the device; ``sizes[i]`` bytes of ``outs[i]`` are the payload, the rest means nothing. States are not
        changed: the caller updates them when the gather has completed. On a GPU, words, states and outs must
        live until the stream has passed.
        """

    @abstractmethod
    def decode_apply_many(
        self, payloads: Sequence[torch.Tensor], words: Sequence[torch.Tensor], flags: torch.Tensor
    ) -> None:
        """Bring each ``words[i]``, which holds the base, to the encoded words, in place.

        ``payloads[i]``: uint8, 16-byte aligned on a GPU, at least as long as the size that ``encode``
        reported; bytes after that are ignored. ``flags``: int32 [n, 2] from :func:`new_flags`. A hash block
        whose decoded words do not match the hash in the payload is left as it was and reported in
        ``flags[i]``; a payload whose header does not fit this codec, dtype, block size or number of values
        counts as all its blocks. Nothing is raised and nothing outside ``payloads[i]`` and ``words[i]`` is
        touched, whatever the payload holds.
        """

    def encode(self, words: torch.Tensor, state: torch.Tensor, out: torch.Tensor, size: torch.Tensor) -> None:
        """:meth:`encode_many` for one segment; ``size`` is int64 [1]."""
        self.encode_many([words], [state], [out], size)

    def decode_apply(self, payload: torch.Tensor, words: torch.Tensor, flags: torch.Tensor) -> None:
        """:meth:`decode_apply_many` for one payload; ``flags`` is int32 [1, 2]."""
        self.decode_apply_many([payload], [words], flags)
