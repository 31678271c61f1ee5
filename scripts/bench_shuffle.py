"""Times token shuffling on recorded routing: see megatron_ciera/shuffle/benchmark.py."""

import sys

import _path  # noqa: F401

from megatron_ciera.shuffle.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
