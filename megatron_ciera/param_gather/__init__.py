"""The compressed, bit-exact parameter gather."""


def weights_changed(expert_only: bool = False) -> None:
    """Tells a running gather that parameters were rewritten outside the optimizer, on all ranks alike.

    For weight surgery, swapped averages and the like. Without it such a change stops the run at the next gather,
    since receivers then hold other words than the sender's codec state says.
    """
    from megatron_ciera.param_gather import feature

    feature.weights_changed(expert_only)
