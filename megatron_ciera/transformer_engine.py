"""What of Transformer Engine a run asks for, and whether it is there. Imports neither it nor Megatron."""

from megatron_ciera.errors import refuse

# Flags of a run without it: Megatron's local layer spec, and none of the CUDA extensions.
LOCAL_LAYERS = (
    *("--transformer-impl", "local", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
    *("--no-masked-softmax-fusion", "--no-rope-fusion"),
)

_INSTALL = "Install it: scripts/install_transformer_engine.sh"


def check(args, is_there: bool) -> None:
    """Rules on parsed arguments, on every rank before any process group is made.

    Args:
        is_there: whether Megatron could import Transformer Engine.

    Raises:
        ConfigurationError: naming the flag that asks for it and the way out.
    """
    if is_there:
        return
    without = "no Transformer Engine that Megatron can import"
    if args.transformer_impl == "transformer_engine":
        raise refuse(
            "--transformer-impl transformer_engine (Megatron's default)",
            without,
            "it",
            f"{_INSTALL}, or set --transformer-impl local.",
        )
    for flag, asked in (
        ("--use-precision-aware-optimizer", args.use_precision_aware_optimizer),
        ("--moe-permute-fusion", args.moe_permute_fusion),
        ("--fp8-format", args.fp8),
    ):
        if asked:
            raise refuse(flag, without, "it", f"{_INSTALL}, or remove {flag}.")


def keeps_remainders(args) -> bool:
    """Whether FusedAdam keeps the low 16 bits of each fp32 master, the bf16 parameter being its upper half.

    args: of this run, or as stored in a checkpoint.
    """
    return (
        bool(getattr(args, "use_precision_aware_optimizer", False))
        and bool(getattr(args, "bf16", False))
        and str(getattr(args, "main_params_dtype", "fp32")).removeprefix("torch.") in ("fp32", "float32")
        and getattr(args, "fp8_recipe", None) in (None, "delayed")
    )
