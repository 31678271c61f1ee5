"""Every rule that our flags put on a run, checked on every rank before any process group is made.

`before_megatron` runs on parsed arguments, ahead of Megatron's own validation, so that its assertions are not
the first thing a user meets. `after_megatron` runs on the values that Megatron derived.
"""

import argparse
import math
import os

from megatron_ciera.errors import check_folder, refuse
from megatron_ciera.flags import given_flags
from megatron_ciera.moe import rules as moe_rules
from megatron_ciera.shuffle import rules as shuffle_rules
from placement.file import FIT_COMMAND

_CIERA_ONLY = (
    ("ciera_codec", "--ciera-codec"),
    ("ciera_coder", "--ciera-coder"),
    ("ciera_block_size", "--ciera-block-size"),
    ("ciera_warmup_iters", "--ciera-warmup-iters"),
    ("ciera_cache_budget_mb", "--ciera-cache-budget-mb"),
    ("ciera_verify_interval", "--ciera-verify-interval"),
    ("ciera_no_selection", "--ciera-no-selection"),
    ("ciera_no_overlap", "--ciera-no-overlap"),
)
_PLACEMENT_ONLY = (
    ("placement_file", "--placement-file"),
    ("placement_fit_iteration", "--placement-fit-iteration"),
    ("placement_refit_interval", "--placement-refit-interval"),
    ("placement_fit_tokens", "--placement-fit-tokens"),
    ("placement_load_tolerance", "--placement-load-tolerance"),
)
_FIT_FLAGS = ("placement_fit_iteration", "placement_refit_interval", "placement_fit_tokens")


def before_megatron(args: argparse.Namespace) -> None:
    """Checks parsed arguments. Reads WORLD_SIZE through `args.world_size`; no side effects.

    Raises:
        ConfigurationError: naming the flag, the value found, the value needed and the way out.
    """
    if not given_flags(args):
        return
    _check_world(args)
    _check_companions(args)
    _check_ranges(args)
    if args.num_experts and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise refuse(
            "--tensor-model-parallel-size",
            f"{args.tensor_model_parallel_size} with experts and without --sequence-parallel",
            "--sequence-parallel, as Megatron's MoE layers do",
            "Add --sequence-parallel, or set --tensor-model-parallel-size 1.",
        )
    if args.ciera_record is not None:
        check_folder("--ciera-record", args.ciera_record)
    if args.ciera:
        _check_ciera(args)
    if args.correlated_placement or args.dedup_dispatch or args.token_shuffle:
        _check_moe(args)
    if args.correlated_placement:
        _check_placement(args)
    if args.dedup_dispatch or (args.correlated_placement and args.moe_token_dispatcher_type == "alltoall"):
        _check_dedup(args)
    if args.token_shuffle:
        shuffle_rules.check(args)


def after_megatron(args: argparse.Namespace) -> None:
    """Checks what Megatron derived from the arguments (expert tensor parallelism, checkpoint types)."""
    expert_tensor_parallel = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    dedup_by_default = args.correlated_placement and args.moe_token_dispatcher_type == "alltoall"
    wants_dedup = args.dedup_dispatch if args.dedup_dispatch is not None else dedup_by_default
    if wants_dedup and expert_tensor_parallel > 1:
        raise refuse(
            "--expert-tensor-parallel-size",
            f"{expert_tensor_parallel} (Megatron's default is --tensor-model-parallel-size)",
            "1 with the deduplicating dispatcher",
            "Set --expert-tensor-parallel-size 1, or add --no-dedup-dispatch.",
        )
    if args.correlated_placement:
        moe_rules.check_derived(args)
    if wants_dedup:
        moe_rules.check_graphs(args, "--dedup-dispatch")
    if args.token_shuffle:
        shuffle_rules.check_derived(args)


def _check_world(args) -> None:
    world = args.world_size
    pipeline = args.pipeline_model_parallel_size
    dense = args.tensor_model_parallel_size * pipeline * args.context_parallel_size
    if world % dense:
        raise refuse(
            "--nproc-per-node x --nnodes of torchrun",
            f"{world} processes",
            f"a multiple of {dense} (tensor x pipeline x context parallel size)",
            f"Launch {math.ceil(world / dense) * dense} processes or reduce the parallel sizes.",
        )
    expert_tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    expert = expert_tensor * args.expert_model_parallel_size * pipeline
    if args.num_experts and world % expert:
        raise refuse(
            "--nproc-per-node x --nnodes of torchrun",
            f"{world} processes",
            f"a multiple of {expert} (expert tensor {expert_tensor} x expert "
            f"{args.expert_model_parallel_size} x pipeline {pipeline} parallel size)",
            f"Launch {math.ceil(world / expert) * expert} processes, or set --expert-tensor-parallel-size 1 "
            "(its default is --tensor-model-parallel-size), or reduce --expert-model-parallel-size.",
        )
    data_parallel = world // dense
    per_step = args.micro_batch_size * data_parallel if args.micro_batch_size else None
    if per_step and args.global_batch_size and args.global_batch_size % per_step:
        raise refuse(
            "--global-batch-size",
            args.global_batch_size,
            f"a multiple of {per_step} (micro batch {args.micro_batch_size} x data parallel {data_parallel})",
            f"Set it to {math.ceil(args.global_batch_size / per_step) * per_step}.",
        )


def _check_companions(args) -> None:
    for name, flag in _CIERA_ONLY:
        if not args.ciera and getattr(args, name) not in (None, False):
            raise refuse(flag, "no --ciera", "--ciera beside it", f"Add --ciera, or remove {flag}.")
    if args.token_shuffle_residual is not None and not args.token_shuffle:
        raise refuse(
            "--token-shuffle-residual",
            "no --token-shuffle",
            "--token-shuffle beside it",
            "Add --token-shuffle, or remove it.",
        )
    for name, flag in _PLACEMENT_ONLY:
        # Prediction tables are fitted when a placement would be.
        fits = args.correlated_placement or (args.token_shuffle and name in _FIT_FLAGS)
        if not fits and getattr(args, name) is not None:
            raise refuse(
                flag,
                "no --correlated-placement",
                "--correlated-placement beside it",
                f"Add --correlated-placement, or remove {flag}.",
            )
    if args.placement_file is not None:
        for name in _FIT_FLAGS:
            if getattr(args, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise refuse(
                    flag,
                    "--placement-file as well",
                    "a run that fits its own placement",
                    f"--placement-file fits and refits nothing: remove it or {flag}.",
                )


def _check_ranges(args) -> None:
    limits = (
        ("ciera_block_size", 8, "8 or more values"),
        ("ciera_warmup_iters", 0, "0 or more iterations"),
        ("ciera_cache_budget_mb", 0, "0 or more MB"),
        ("ciera_verify_interval", 0, "0 (never) or a number of iterations"),
        ("placement_fit_iteration", 1, "1 or more"),
        ("placement_refit_interval", 0, "0 (never) or a number of iterations"),
        ("placement_fit_tokens", 64, "64 or more tokens"),
        ("placement_load_tolerance", 0, "0 or more"),
    )
    for name, least, wanted in limits:
        value = getattr(args, name)
        if value is not None and not value >= least:
            raise refuse("--" + name.replace("_", "-"), value, wanted, "Correct the value.")
    if args.ciera_block_size is not None and args.ciera_block_size % 8:
        raise refuse("--ciera-block-size", args.ciera_block_size, "a multiple of 8", "The default is 512.")


def _check_ciera(args) -> None:
    if args.use_megatron_fsdp or args.use_torch_fsdp2:
        flag = "--use-megatron-fsdp" if args.use_megatron_fsdp else "--use-torch-fsdp2"
        raise refuse(
            "--ciera", flag, "Megatron's distributed optimizer", f"Remove {flag}, or leave out --ciera."
        )
    if not args.use_distributed_optimizer:
        raise refuse(
            "--ciera",
            "no --use-distributed-optimizer",
            "--use-distributed-optimizer: without it no parameter is gathered",
            "Add --use-distributed-optimizer, or leave out --ciera.",
        )


def _check_moe(args) -> None:
    flag = next(spelled for spelled in given_flags(args) if not spelled.startswith("--ciera"))
    if not args.num_experts:
        raise refuse(flag, "a model without experts", "--num-experts", f"Add --num-experts or remove {flag}.")
    if args.expert_model_parallel_size < 2:
        raise refuse(
            flag,
            f"--expert-model-parallel-size {args.expert_model_parallel_size}",
            "at least 2: with one rank there is nothing to send",
            f"Set --expert-model-parallel-size, or remove {flag}"
            + (
                ". A checkpoint that was saved at a larger size is read without it as well, with --no-load-optim: "
                "Megatron has one optimizer at size 1 and two above."
                if args.load is not None
                else "."
            ),
        )
    if args.num_experts % args.expert_model_parallel_size:
        raise refuse(
            "--num-experts",
            args.num_experts,
            f"a multiple of --expert-model-parallel-size {args.expert_model_parallel_size}",
            "Change one of the two.",
        )
    if getattr(args, "moe_use_upcycling", False):
        raise refuse(
            flag, "--moe-use-upcycling", "a model that is MoE already", "Upcycle first, then add it."
        )


def _check_placement(args) -> None:
    if args.save is not None or args.load is not None:
        if args.ckpt_format != "torch_dist":
            raise refuse(
                "--ckpt-format",
                args.ckpt_format,
                "torch_dist with --correlated-placement (other formats store experts by place, not by name)",
                "Use --ckpt-format torch_dist, or leave out --correlated-placement.",
            )
    file = args.placement_file
    if file is not None and (os.path.isdir(file) or not os.access(file, os.R_OK)):
        raise refuse(
            "--placement-file",
            f"{file}, which {'is a folder' if os.path.isdir(file) else 'cannot be read'}",
            f"a file written by {FIT_COMMAND}",
            "Check the path; every node must see the same file.",
        )
    if args.placement_file is None and getattr(args, "moe_router_force_load_balancing", False):
        raise refuse(
            "--correlated-placement",
            "--moe-router-force-load-balancing",
            "routing by the trained router: forced routing has no correlation to fit",
            "Remove one of the two.",
        )
    moe_rules.check_placement(args)


def _check_dedup(args) -> None:
    if args.dedup_dispatch is False:
        return
    explicit = args.dedup_dispatch
    flag = "--dedup-dispatch" if explicit else "--correlated-placement (which turns on --dedup-dispatch)"
    if args.moe_token_dispatcher_type != "alltoall":
        raise refuse(
            flag,
            f"--moe-token-dispatcher-type {args.moe_token_dispatcher_type}",
            "--moe-token-dispatcher-type alltoall",
            "Add --moe-token-dispatcher-type alltoall, or leave out --dedup-dispatch.",
        )
    moe_rules.check_dedup(args, flag)
