"""Times the deduplicating dispatcher against stock on recorded routing: see megatron_ciera/moe/benchmark.py."""

import sys

import _path  # noqa: F401

from megatron_ciera.moe.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
