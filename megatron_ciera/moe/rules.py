"""What placement and deduplicating dispatch ask of a run's flags. Imports no Megatron; see validation.py."""

from megatron_ciera.errors import ConfigurationError, refuse
from placement.file import Placement

# A graph that holds the dispatcher would replay the sizes of one iteration for ever.
_GRAPHED_DISPATCH = ("moe", "moe_preprocess")

# Recipes of --fp8-recipe that take every scale from the tensor at hand.
_STATELESS_RECIPES = ("tensorwise", "blockwise", "mxfp8")


def check_placement(args) -> None:
    """Rules of --correlated-placement beyond those on checkpoints' formats. Reads the placement file.

    Raises:
        ConfigurationError: naming flag, value found, value needed and the way out.
    """
    way_out = "Remove it, or leave out --correlated-placement."
    _check_fp8(args)
    for flag, found in (
        ("--fp4-format", args.fp4),
        ("--moe-single-grouped-weight", args.moe_single_grouped_weight),
        ("--moe-single-grouped-bias", args.moe_single_grouped_bias),
        ("--optimizer-cpu-offload", args.optimizer_cpu_offload),
        ("--use-megatron-fsdp", args.use_megatron_fsdp),
        ("--use-torch-fsdp2", args.use_torch_fsdp2),
        ("--transformer-impl inference_optimized", args.transformer_impl == "inference_optimized"),
    ):
        if found:
            raise refuse(
                "--correlated-placement",
                flag if found is True else f"{flag} {found}",
                "a run without it: its expert state is not moved yet",
                way_out,
            )
    if args.optimizer not in ("adam", "sgd"):
        raise refuse("--correlated-placement", f"--optimizer {args.optimizer}", "adam or sgd", way_out)
    if args.use_precision_aware_optimizer:
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if str(getattr(args, name)).removeprefix("torch.") in ("fp16", "float16", "fp8", "uint8"):
                raise refuse(
                    "--" + name.replace("_", "-"),
                    getattr(args, name),
                    "fp32 or bf16 with --correlated-placement: fp16 and fp8 states are scaled by tensor",
                    "Set it to fp32 or bf16.",
                )
    if args.placement_file is not None:
        _check_file(args)


def _check_fp8(args) -> None:
    """fp8 products over bf16 parameters keep nothing from step to step unless their scaling is delayed."""
    if not args.fp8:
        return
    if args.fp8_recipe not in _STATELESS_RECIPES:
        raise refuse(
            "--correlated-placement",
            f"--fp8-format {args.fp8} with --fp8-recipe {args.fp8_recipe} (Megatron's default is delayed)",
            "a recipe whose experts have no history that would have to move: "
            + ", ".join(_STATELESS_RECIPES),
            "Set --fp8-recipe tensorwise, or leave out --correlated-placement.",
        )
    if args.fp8_param_gather:
        raise refuse(
            "--correlated-placement",
            "--fp8-param-gather",
            "bf16 parameters: experts in fp8 are not moved yet",
            "Remove --fp8-param-gather, or leave out --correlated-placement.",
        )


def check_derived(args) -> None:
    """Rules of --correlated-placement on values that Megatron derives."""
    if getattr(args, "expert_gtp_weight_remat_size", 1) > 1:
        raise refuse(
            "--expert-tensor-parallel-num-weight-shards",
            args.expert_tensor_parallel_num_weight_shards,
            "whole expert weights with --correlated-placement: sharded ones are not moved yet",
            "Leave it out, or leave out --correlated-placement.",
        )


def check_dedup(args, flag: str) -> None:
    """Rules of the deduplicating dispatcher that need no derived values. `flag` is how it was asked for."""
    if args.transformer_impl == "inference_optimized":
        raise refuse(
            flag,
            "--transformer-impl inference_optimized",
            "another implementation: this one puts its own dispatcher in place at every forward pass",
            "Change --transformer-impl, or add --no-dedup-dispatch.",
        )
    if args.moe_router_padding_for_quantization or getattr(args, "moe_router_padding_for_fp8", False):
        raise refuse(
            flag,
            "--moe-router-padding-for-quantization",
            "a run without it: padding entries are no tokens' experts",
            "Remove it, or add --no-dedup-dispatch.",
        )


def check_graphs(args, flag: str) -> None:
    """Refuses CUDA graphs over the dispatcher, on validated arguments; attention and router scopes work."""
    if getattr(args, "cuda_graph_impl", "none") == "none":
        return
    modules = [str(getattr(module, "name", module)) for module in args.cuda_graph_modules]
    bad = [name for name in modules if name in _GRAPHED_DISPATCH]
    if bad or not modules:
        raise refuse(
            flag,
            f"--cuda-graph-impl {args.cuda_graph_impl} over {', '.join(bad) or 'whole layers'}",
            "graphs that leave out the dispatcher, whose sizes change with every batch",
            "Use --cuda-graph-modules attn moe_router, or add --no-dedup-dispatch.",
        )


def decoder_moe_layers(args) -> list[int] | None:
    """0-based global numbers of the decoder's MoE layers, as Megatron's specs choose them; None if unknown."""
    if getattr(args, "hybrid_layer_pattern", None) or args.num_layers is None:
        return None
    frequency = args.moe_layer_freq
    if isinstance(frequency, int):
        return [layer for layer in range(args.num_layers) if layer % frequency == 0]
    return [layer for layer, is_moe in enumerate(frequency) if is_moe]


def _check_file(args) -> None:
    layers = decoder_moe_layers(args)
    try:
        placement = Placement.load(args.placement_file)
        if layers is not None:
            placement.check_model(
                args.num_experts,
                args.moe_router_topk,
                args.expert_model_parallel_size,
                layers,
                range(args.mtp_num_layers or 0),
            )
    except ValueError as error:
        raise ConfigurationError(f"--placement-file: {error}") from error
