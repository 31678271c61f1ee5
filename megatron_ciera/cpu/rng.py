"""One random generator for host and device, and a data loader that does not move it.

Megatron keeps the states of the device generator by name (`CudaRNGStatesTracker`) and draws dropout masks
and initial weights from it. On CPU that generator is torch's default one. On a GPU box the host generator
is another; the only draw from it in training is the base seed of a DataLoader iterator. That draw is made
here without moving the generator, otherwise a resumed run, which makes its iterator after the checkpoint's
state has been loaded, would get other dropout masks than the uninterrupted one.
"""

import logging

import torch
from torch.utils.data import dataloader

from megatron_ciera.cpu.replace import replace
from megatron_ciera.seam import wrap


def install() -> None:
    """Let torch.cuda's generator functions act on the CPU generator, and keep the data loader off it."""
    for module in (torch.cuda, torch.cuda.random):
        replace(module, "get_rng_state", lambda device="cuda": torch.get_rng_state())
        replace(module, "set_rng_state", lambda new_state, device="cuda": torch.set_rng_state(new_state))
        replace(module, "get_rng_state_all", lambda: [torch.get_rng_state()])
        replace(module, "set_rng_state_all", lambda new_states: torch.set_rng_state(new_states[0]))
        replace(module, "manual_seed", lambda seed: _seed(seed))
        replace(module, "manual_seed_all", lambda seed: _seed(seed))
    # tensor_parallel/random.py sets states on the default generator itself.
    replace(torch.cuda, "default_generators", _OneGenerator())
    wrap(dataloader._BaseDataLoaderIter, "__init__", ("self", "loader"), _without_moving_generator)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_not_shared_generator_warning)


class _OneGenerator:
    """`torch.cuda.default_generators`: whatever the index (here the current device, not a number)."""

    def __getitem__(self, index) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _without_moving_generator(init):
    def init_iterator(self, loader) -> None:
        state = torch.get_rng_state()
        init(self, loader)
        torch.set_rng_state(state)

    return init_iterator


def _is_not_shared_generator_warning(record: logging.LogRecord) -> bool:
    # The tracker warns when the host generator moves in a fork; here it is the device's and has to move.
    return "CPU RNG state changed" not in record.getMessage()
