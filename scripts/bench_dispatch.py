"""Times the deduplicating dispatcher against stock, on recorded routing or, with --training, in a training run.

See megatron_ciera/moe/benchmark.py and training_benchmark.py.
"""

import sys

import _path  # noqa: F401

if __name__ == "__main__":
    if "--training" in sys.argv:
        from megatron_ciera.moe.training_benchmark import main
    else:
        from megatron_ciera.moe.benchmark import main
    sys.exit(main(sys.argv[1:]))
