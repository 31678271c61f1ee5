"""Which codecs and entropy coders this job can use: found on each rank, agreed by all."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_ciera.errors import ConfigurationError
from megatron_ciera.param_gather.codec import CODECS, Codec, make_codec


def wanted_codecs(codec: str, select: bool) -> tuple[str, ...]:
    """The codecs that `--ciera-codec` allows, the preferred one first."""
    if codec != "auto":
        return (codec,)
    return ("delta", "exponent-reuse") if select else ("delta",)


def usable(
    names: Sequence[str], coder: str, dtype: torch.dtype, block_size: int, device
) -> dict[str, Codec | str]:
    """Each codec, or the reason why it cannot be made on this rank."""
    made: dict[str, Codec | str] = {}
    for name in names:
        try:
            made[name] = make_codec(name, coder, dtype, block_size, device)
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            made[name] = f"{type(error).__name__}: {error}"
    return made


def agree_on_codecs(
    codec: str, coder: str, select: bool, dtype: torch.dtype, block_size: int, device: torch.device
) -> tuple[dict[str, Codec], list[str]]:
    """Codecs that every rank of the world can make with the same coder and version, and notes for the log.

    Collective. With coder `auto`, where a rank cannot use what the others can, all use `packed`.

    Raises:
        ConfigurationError: on every rank alike, if no codec that the flags allow is left.
    """
    names = wanted_codecs(codec, select)
    notes: list[str] = []
    for tried in (coder, "packed") if coder == "auto" else (coder,):
        mine = usable(names, tried, dtype, block_size, device)
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {name: _identity(made) for name, made in mine.items()})
        agreed = [name for name in names if _same(everyone, name)]
        for name in names:
            if name not in agreed:
                notes.append(f"codec {name} with coder {tried} is not used: {_difference(everyone, name)}")
        if agreed:
            return {name: mine[name] for name in agreed}, notes
    raise ConfigurationError(
        f"--ciera-codec {codec} --ciera-coder {coder}: no codec works on every rank. "
        f"{'; '.join(dict.fromkeys(notes))}. Use another codec or coder ({', '.join(CODECS)}; ans, packed), or "
        "leave out --ciera."
    )


def _identity(made: Codec | str) -> tuple[bool, str]:
    if isinstance(made, str):
        return False, made
    return True, f"{made.coder_name} version {getattr(made, 'coder_version', 0)}"


def _same(everyone: list, name: str) -> bool:
    return all(found[name][0] for found in everyone) and len({found[name] for found in everyone}) == 1


def _difference(everyone: list, name: str) -> str:
    kinds: dict[str, list[int]] = {}
    for rank, found in enumerate(everyone):
        kinds.setdefault(found[name][1], []).append(rank)
    return "; ".join(f"rank {', '.join(map(str, ranks[:8]))}: {what}" for what, ranks in kinds.items())
