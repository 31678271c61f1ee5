"""Two runs compared bit for bit: see megatron_ciera/comparison_cli.py."""

import sys

import _path  # noqa: F401

from megatron_ciera.comparison_cli import main

if __name__ == "__main__":
    sys.exit(main())
