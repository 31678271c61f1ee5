"""Trains a GPT with Megatron-Core from installed packages alone.

    torchrun … scripts/pretrain_gpt.py [--config configs/X.yaml] <Megatron flags> --ciera --correlated-placement …

For an upstream script of your own Megatron-LM checkout use `python -m megatron_ciera SCRIPT` instead.
"""

import _path  # noqa: F401  (lets the script run from a clone without installation)

from megatron_ciera.launch import prepare, prepare_spawned


def main() -> None:
    """Attaches to Megatron, then imports what needs it, and trains."""
    prepare()
    from _gpt import train

    train()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    prepare_spawned()
