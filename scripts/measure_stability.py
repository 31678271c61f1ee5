"""What changes between two weight snapshots: see megatron_ciera/param_gather/codec/stability_cli.py."""

import sys

import _path  # noqa: F401

from megatron_ciera.param_gather.codec.stability_cli import main

if __name__ == "__main__":
    sys.exit(main())
