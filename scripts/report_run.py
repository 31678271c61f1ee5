"""report.html of a finished run: see megatron_ciera/report/cli.py."""

import sys

import _path  # noqa: F401

from megatron_ciera.report.cli import main

if __name__ == "__main__":
    sys.exit(main())
