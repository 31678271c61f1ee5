"""MoE training on Megatron-Core that communicates less, without changing what is trained.

Importing this package does nothing. A run is attached by `python -m megatron_ciera SCRIPT …` or by
`megatron_ciera.launch.prepare()` in a script of your own; see docs/overview.md.
"""

__version__ = "0.1.0"
