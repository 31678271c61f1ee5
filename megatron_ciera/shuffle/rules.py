"""What token shuffling asks of a run's flags. Imports no Megatron; see validation.py."""

from megatron_ciera.errors import ConfigurationError, refuse
from megatron_ciera.moe.rules import decoder_moe_layers
from placement.file import FIT_COMMAND, Placement
from placement.table_file import load_tables

_WAY_OUT = "or leave out --token-shuffle."
# Between a placement's fit, the tables fitted for it, and the next placement.
_LEAST_REFIT_INTERVAL = 20

# name in args, flag, value that is fine (besides None and False), why
_WITHOUT = (
    ("context_parallel_size", "--context-parallel-size", 1, "a rank would hold two pieces of the sequence"),
    (
        "multi_latent_attention",
        "--multi-latent-attention",
        None,
        "its projections gather tokens in several places",
    ),
    (
        "experimental_attention_variant",
        "--experimental-attention-variant",
        None,
        "its layers have no linear_qkv",
    ),
    ("sft", "--sft", None, "packed sequences are cut by position"),
    (
        "dataloader_inter_document_masking",
        "--dataloader-inter-document-masking",
        None,
        "packed sequences are cut by position",
    ),
    ("rl_use_sequence_packing", "--rl-use-sequence-packing", None, "packed sequences are cut by position"),
    ("hybrid_layer_pattern", "--hybrid-layer-pattern", None, "Mamba layers read tokens in order"),
    ("hybrid_override_pattern", "--hybrid-override-pattern", None, "Mamba layers read tokens in order"),
    ("is_hybrid_model", "--is-hybrid-model", None, "Mamba layers read tokens in order"),
    ("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path", None, "its layers differ"),
    (
        "heterogeneous_layers_config_encoded_json",
        "--heterogeneous-layers-config-encoded-json",
        None,
        "its layers differ",
    ),
    (
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm",
        None,
        "it runs layers in pieces, two micro-batches at a time",
    ),
    (
        "moe_expert_capacity_factor",
        "--moe-expert-capacity-factor",
        None,
        "a rank drops among its own tokens, so that other tokens would be dropped",
    ),
    (
        "moe_router_padding_for_quantization",
        "--moe-router-padding-for-quantization",
        None,
        "padding entries are no tokens' experts",
    ),
    (
        "moe_router_force_load_balancing",
        "--moe-router-force-load-balancing",
        None,
        "random routing predicts nothing",
    ),
    ("moe_enable_routing_replay", "--moe-enable-routing-replay", None, "it replays tokens by position"),
    ("fused_residual_rmsnorm", "--fused-residual-rmsnorm", None, "the norm keeps the residual to itself"),
    (
        "fine_grained_activation_offloading",
        "--fine-grained-activation-offloading",
        None,
        "the residual may be away when it has to move",
    ),
    ("mlp_chunks_for_training", "--mlp-chunks-for-training", 1, "the router would see a part of the tokens"),
    ("fp8", "--fp8-format", None, "scaling blocks would hold other tokens; not tested"),
    ("fp4", "--fp4-format", None, "scaling blocks would hold other tokens; not tested"),
)


def check(args) -> None:
    """Rules of --token-shuffle on parsed arguments. Reads the placement file and its tables.

    Raises:
        ConfigurationError: naming flag, value found, value needed and the way out.
    """
    _check_sizes(args)
    for name, flag, fine, why in _WITHOUT:
        found = getattr(args, name, None)
        if found not in (None, False, fine):
            shown = flag if found is True else f"{flag} {found}"
            raise refuse("--token-shuffle", shown, f"a run without it: {why}", f"Remove {flag}, {_WAY_OUT}")
    if args.transformer_impl == "inference_optimized":
        raise refuse(
            "--token-shuffle",
            "--transformer-impl inference_optimized",
            "local or transformer_engine",
            "Change it.",
        )
    if args.moe_token_dispatcher_type == "allgather":
        raise refuse(
            "--token-shuffle",
            "--moe-token-dispatcher-type allgather",
            "alltoall or flex: allgather sends every token to every rank, wherever it is",
            f"Set --moe-token-dispatcher-type alltoall, {_WAY_OUT}",
        )
    balancing = args.moe_router_load_balancing_type
    if "sinkhorn" in ([balancing] if isinstance(balancing, str) else balancing):
        raise refuse(
            "--token-shuffle",
            "--moe-router-load-balancing-type sinkhorn",
            "another type: sinkhorn balances each rank's own tokens, so that routing would change",
            f"Change it, {_WAY_OUT}",
        )
    if args.moe_routing_trace_path is not None and args.moe_routing_trace_max_training_iters is None:
        raise refuse(
            "--token-shuffle",
            "--moe-routing-trace-path without an end",
            "--moe-routing-trace-max-training-iters: traced iterations keep their tokens in order",
            f"Add it, {_WAY_OUT}",
        )
    _check_chunks(args)
    _check_residual(args)
    _check_tables(args)


def check_derived(args) -> None:
    """Rules on values that Megatron derives."""
    if getattr(args, "cuda_graph_impl", "none") != "none":
        raise refuse(
            "--token-shuffle",
            f"--cuda-graph-impl {args.cuda_graph_impl}",
            "none: a graph would replay one batch's order for ever",
            f"Leave it out, {_WAY_OUT}",
        )


def _check_sizes(args) -> None:
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size
    if tensor != expert:
        raise refuse(
            "--token-shuffle",
            f"--tensor-model-parallel-size {tensor} and --expert-model-parallel-size {expert}",
            "the two to be equal",
            f"Change one of them, {_WAY_OUT}",
        )
    if not args.sequence_parallel:
        raise refuse(
            "--token-shuffle",
            "no --sequence-parallel",
            "--sequence-parallel",
            f"Add --sequence-parallel, {_WAY_OUT}",
        )
    if args.expert_tensor_parallel_size != 1:
        raise refuse(
            "--token-shuffle",
            f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size or tensor}",
            "1",
            f"Add --expert-tensor-parallel-size 1, {_WAY_OUT}",
        )


def _check_chunks(args) -> None:
    """A layer shuffles behind two MoE layers and in front of a last one, all in one pipeline chunk."""
    layers = decoder_moe_layers(args)
    if layers is not None and len(layers) < 3 or (args.num_layers or 4) < 4:
        raise refuse(
            "--token-shuffle",
            f"--num-layers {args.num_layers} with {len(layers or [])} MoE layers",
            "four layers or more, the first two and one more of them MoE",
            "Leave out --token-shuffle.",
        )


def _check_residual(args) -> None:
    if args.token_shuffle_residual != "partial-sums":
        return
    for found, wanted in (
        (args.transformer_impl != "local" and f"--transformer-impl {args.transformer_impl}", "local"),
        (args.hidden_dropout and f"--hidden-dropout {args.hidden_dropout}", "--hidden-dropout 0"),
        (args.fp32_residual_connection and "--fp32-residual-connection", "a residual in the model's dtype"),
    ):
        if found:
            raise refuse(
                "--token-shuffle-residual partial-sums",
                found,
                wanted,
                "Change it, or use --token-shuffle-residual exchange.",
            )


def _check_tables(args) -> None:
    if args.placement_file is None:
        interval = args.placement_refit_interval
        if args.correlated_placement and interval is not None and 0 < interval < _LEAST_REFIT_INTERVAL:
            raise refuse(
                "--placement-refit-interval",
                interval,
                f"0 or at least {_LEAST_REFIT_INTERVAL} with --token-shuffle: tables follow each placement",
                "Raise it.",
            )
        return
    try:
        placement = Placement.load(args.placement_file)
        tables = load_tables(placement.tables_path, placement)
    except ValueError as error:
        raise ConfigurationError(f"--token-shuffle: {error}") from error
    if tables is None:
        raise refuse(
            "--token-shuffle",
            f"--placement-file {args.placement_file} without {placement.tables_path}",
            f"the prediction tables that {FIT_COMMAND} writes beside the placement",
            f"Copy them there too or fit again, {_WAY_OUT}",
        )
    if not any(table is not None and table.held_out_locality > table.held_out_chance for table in tables):
        raise refuse(
            "--token-shuffle",
            f"tables in {placement.tables_path} that predict no layer better than its tokens' position",
            "tables of at least three MoE layers whose routing depends on the layers before",
            "Fit again from more tokens of a trained model, " + _WAY_OUT,
        )
