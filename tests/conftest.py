"""Shared by all tests: the CPU layer before any import of Megatron, and a session's scratch folder."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_ciera import cpu  # noqa: E402

if cpu.is_needed():
    cpu.install()


@pytest.fixture(scope="session")
def parse_flags():
    """Parses a command line with Megatron's own parser and our flags; no validation, no process group."""
    from megatron.training import arguments

    from megatron_ciera import install

    install.install()

    def parse(words: str | list[str], world_size: int = 4):
        words = words.split() if isinstance(words, str) else words
        before, sys.argv = sys.argv, ["pretrain_gpt.py", *words]
        try:
            args = arguments.parse_args()
        finally:
            sys.argv = before
        args.world_size = world_size
        return args

    return parse
