"""Evaluates a placement on tokens it has not seen: see placement/cli_evaluate.py."""

import sys

import _path  # noqa: F401

from placement.cli_evaluate import main

if __name__ == "__main__":
    sys.exit(main())
