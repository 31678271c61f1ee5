"""Real Megatron-Core training without a GPU, over gloo. See docs/cpu.md.

Nothing happens at import. The launcher calls, in this order:
`is_needed()`, `install()`, `default_arguments(argv)`, then imports Megatron, then
`install_megatron_patches()`.
"""

from megatron_ciera.cpu.arguments import default_arguments
from megatron_ciera.cpu.layer import install, install_megatron_patches, is_needed

__all__ = ["default_arguments", "install", "install_megatron_patches", "is_needed"]
