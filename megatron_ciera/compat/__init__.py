"""What a Megatron from the wheel, without Transformer Engine, lacks on CPU and GPU alike.

Nothing happens at import. `install()` is called once by the launcher, after Megatron can be imported.
"""


def install() -> None:
    """Apply every patch of this package; idempotent. Raises ConfigurationError if Megatron has changed."""
    from megatron_ciera.compat import dataset_helpers, norms

    norms.install()
    dataset_helpers.install()


__all__ = ["install"]
