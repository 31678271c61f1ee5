"""Projects step times of a config, or of a recorded trace, on a cluster. See docs/simulator.md.

python scripts/simulate.py --config configs/X.yaml [--trace PATH] [--gpus 8,16,…] [--features …] [--json]
"""

# isort: off
import _path  # noqa: F401  (lets the script run from a clone without installation)
from megatron_ciera.simulator.cli import main
# isort: on

if __name__ == "__main__":
    raise SystemExit(main())
