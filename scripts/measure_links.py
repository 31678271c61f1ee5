"""Measures the links between the GPUs at hand and prints them for the `cluster:` section of a config.

torchrun --nproc-per-node 8 [--nnodes N …] scripts/measure_links.py [--json]
"""

# isort: off
import _path  # noqa: F401  (lets the script run from a clone without installation)
from megatron_ciera.simulator.links import main
# isort: on

if __name__ == "__main__":
    main()
