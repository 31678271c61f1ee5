"""Fits a placement from a routing trace: see placement/cli_fit.py."""

import sys

import _path  # noqa: F401

from placement.cli_fit import main

if __name__ == "__main__":
    sys.exit(main())
