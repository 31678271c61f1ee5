"""The placement that a checkpoint was saved under, and whether this run may load it."""

from dataclasses import dataclass

import numpy as np

from megatron_ciera.transformer_engine import keeps_remainders
from placement.file import Placement

KEY = "ciera_placement"
# Follows the model's entries, and so is in logical order; but Megatron-Core 0.19 cannot read it any more.
UNREADABLE_FORMAT = "fully_sharded_model_space"
PHYSICAL_FORMATS = ("dp_reshardable", "dp_zero_gather_scatter")


@dataclass(frozen=True)
class StoredCheckpoint:
    """What the checkpoint that will be loaded says. `placement` None: saved in contiguous placement.

    expert_parallel_size: of the run that saved it.
    remainders: in the place of masters it holds what precision-aware FusedAdam keeps of them, see optimizer_state.
    """

    placement: Placement | None
    optimizer_format: str | None
    loads_optimizer: bool
    expert_parallel_size: int
    remainders: bool = False


def read_stored(args) -> StoredCheckpoint | None:
    """Reads the common state of the checkpoint that `args` will load; None when none will be loaded.

    Called on every rank. Raises ValueError for a stored placement that is damaged.
    """
    from megatron.training import checkpointing

    pretrained = getattr(args, "pretrained_checkpoint", None)
    for load, finetunes in ((args.load, args.finetune), (pretrained, True)):
        if load is None or not checkpointing.checkpoint_exists(load):
            continue
        state, _, release, _ = checkpointing._load_base_checkpoint(load, args, rank0=True)
        if state is None:
            continue
        stored_args = state.get("args")
        document = getattr(stored_args, KEY, None)
        return StoredCheckpoint(
            placement=None if document is None else Placement.from_document(document),
            optimizer_format=_optimizer_format(state, stored_args),
            loads_optimizer=not (
                release or finetunes or args.no_load_optim or getattr(stored_args, "no_save_optim", False)
            ),
            expert_parallel_size=getattr(stored_args, "expert_model_parallel_size", 1),
            remainders=keeps_remainders(stored_args),
        )
    return None


def _optimizer_format(state: dict, stored_args) -> str | None:
    """The distributed optimizer's format; what Megatron assumes where the checkpoint does not name one."""
    metadata = state.get("content_metadata")
    if metadata is not None:
        return metadata.get("distrib_optim_sharding_type")
    if not getattr(stored_args, "use_distributed_optimizer", False):
        return None
    parallel = getattr(stored_args, "ckpt_fully_parallel_save", False)
    return UNREADABLE_FORMAT if parallel else "dp_zero_gather_scatter"


def check_loadable(
    stored: StoredCheckpoint, applies_placement: bool, expert_parallel_size: int, remainders: bool = False
) -> None:
    """Checks the optimizer's format, before anything but the common state was read.

    Args:
        expert_parallel_size: of this run.
        remainders: whether this run's optimizer keeps remainders in the place of masters.

    Raises:
        ValueError: Megatron could not read the format, state by slot would reach other experts (this run has
            other slots, or takes no placement), or masters would be taken for remainders or the other way round.
    """
    if not stored.loads_optimizer:
        return
    if stored.remainders != remainders:
        kept = ("whole fp32 masters", "their low 16 bits (--use-precision-aware-optimizer)")
        raise ValueError(
            f"--load: the checkpoint's optimizer has {kept[stored.remainders]}, this run's {kept[remainders]}. "
            "Megatron would take one for the other: resume with the optimizer flags that it was saved with, or add "
            "--no-load-optim to take the weights alone."
        )
    if stored.optimizer_format == UNREADABLE_FORMAT:
        raise ValueError(
            f"--load: the checkpoint has the optimizer format {UNREADABLE_FORMAT}, needs fully_reshardable or "
            "dp_reshardable: Megatron-Core 0.19 does not read flattened tensors any more. Resume it with the "
            "Megatron that wrote it and save with --dist-ckpt-optim-fully-reshardable, or add --no-load-optim "
            "to take the weights alone."
        )
    if stored.optimizer_format in PHYSICAL_FORMATS:
        _check_slots(stored, applies_placement, expert_parallel_size)


def _check_slots(stored: StoredCheckpoint, applies_placement: bool, expert_parallel_size: int) -> None:
    if stored.expert_parallel_size != expert_parallel_size:
        # Where expert tensor parallelism makes up for it the sizes agree, and Megatron would read it in silence.
        raise ValueError(
            f"--expert-model-parallel-size: found {expert_parallel_size}, needs {stored.expert_parallel_size} as in "
            f"the checkpoint of --load: its optimizer format {stored.optimizer_format} stores state by slot, and at "
            "another size a slot holds another expert. Resume at the checkpoint's size (to change it, save there "
            "once with --dist-ckpt-optim-fully-reshardable, which stores state by expert), or add --no-load-optim "
            "to take the weights alone."
        )
    if stored.placement is None:
        return
    if stored.placement.expert_parallel_size != stored.expert_parallel_size:
        raise ValueError(
            f"--load: the checkpoint's placement is for expert-parallel size "
            f"{stored.placement.expert_parallel_size}, needs {stored.expert_parallel_size}, the size that it was "
            f"saved at: its optimizer format {stored.optimizer_format} stores state by slot, and which expert a slot "
            "held is not known. Add --no-load-optim to take the weights alone (they are stored by expert)."
        )
    if applies_placement or all(
        np.array_equal(layer.physical_to_logical_map, np.arange(stored.placement.num_experts))
        for layer in stored.placement.layers
    ):
        return
    raise ValueError(
        f"--load: the checkpoint was saved under a correlated placement with the optimizer format "
        f"{stored.optimizer_format}, which stores optimizer state by slot. Add --correlated-placement to resume it, "
        "or --no-load-optim to take the weights alone (they are stored by expert)."
    )
