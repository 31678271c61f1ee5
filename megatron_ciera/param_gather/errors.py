"""The error that ends a run when ranks no longer agree. It is raised on every rank of the group."""


class ParamGatherError(RuntimeError):
    """Ranks differ, or gathered parameters do not have the bits that their owner sent."""


REMEDY = (
    "No checkpoint was written since. Restart from the last one; to find the cause, run with "
    "--ciera-verify-interval 1, or without --ciera (MEGATRON_CIERA_DISABLE=1) to rule it out."
)
