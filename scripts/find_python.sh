#!/bin/sh
# Prints the first interpreter that runs and has a Megatron-Core 0.19 wheel (Python 3.12 or 3.13).
# A name on PATH may be a shim that fails, so each candidate is tried.
for python in python3.12 python3.13 python3 python "$HOME"/.pyenv/versions/3.12*/bin/python "$HOME"/.pyenv/versions/3.13*/bin/python; do
    if "$python" -c 'import sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; then
        echo "$python"
        exit 0
    fi
done
exit 0
