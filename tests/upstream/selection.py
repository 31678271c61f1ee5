"""Which of Megatron-LM's unit tests are run, by group, and which are not, and why. Paths below tests/unit_tests."""

PROCESSES = {"moe": 8, "optimizer": 4, "checkpoint": 8}
PROCESSES_ON_GPU = 8  # most of these tests ask for 4 or 8; ranks share GPUs

_MOE = "transformer/moe"
_CKPT = "dist_checkpointing"

GROUPS = {
    "moe": (
        f"{_MOE}/test_a2a_token_dispatcher.py",
        f"{_MOE}/test_token_dispatcher.py",
        f"{_MOE}/test_routers.py",
        f"{_MOE}/test_aux_loss.py",
        f"{_MOE}/test_qb_routing.py",
        f"{_MOE}/test_router_replay.py",
        f"{_MOE}/test_router_trace.py",
        f"{_MOE}/test_moe_layer.py",
        f"{_MOE}/test_sequential_mlp.py",
        f"{_MOE}/test_shared_experts.py",
        f"{_MOE}/test_grouped_mlp.py",
    ),
    "optimizer": (
        "distributed/test_distributed_data_parallel.py",
        "distributed/test_finalize_model_grads.py",
        "distributed/test_grad_reduce_for_replicated_embedder.py",
        "distributed/test_grad_sync_with_expert_parallel.py",
        "distributed/test_layer_wise_param_layout.py",
        "distributed/test_param_and_grad_buffer.py",
        "distributed/test_param_layout.py",
        "distributed/test_reduce_scatter_with_fp32_accumulation.py",
        "optimizer/test_clip_grads.py",
        "optimizer/test_optimizer_config.py",
        "optimizer/test_param_group_identifier_keys.py",
        "test_local_multi_tensor_fns.py",
        "test_wrap_model_chunks_with_ddp.py",
    ),
    "checkpoint": (
        f"{_CKPT}/test_mapping.py",
        f"{_CKPT}/test_serialization.py",
        f"{_CKPT}/test_fully_parallel.py",
        f"{_CKPT}/test_torch_dist.py",
        f"{_CKPT}/test_integrity.py",
        f"{_CKPT}/test_global_metadata_reuse.py",
        f"{_CKPT}/test_validation.py",
        f"{_CKPT}/test_nonpersistent.py",
        f"{_CKPT}/test_pipeline_parallel_layout.py",
        f"{_CKPT}/test_checkpointable.py",
        f"{_CKPT}/test_safe_globals.py",
        f"{_CKPT}/models/test_moe_experts.py",
        f"{_CKPT}/models/test_mlp_glu.py",
        f"{_CKPT}/models/test_gpt_model.py",
        f"{_CKPT}/test_optimizer.py",  # last: on two cores it takes longer than all others
    ),
}

# What needs Transformer Engine as well, run with --gpu behind the others.
ON_GPU = {
    "moe": (
        f"{_MOE}/test_moe_layer_discrepancy.py",
        f"{_MOE}/test_latent_moe_layer.py",
        f"{_MOE}/test_moe_single_grouped_weight_numerics.py",
        f"{_MOE}/test_upcycling.py",
    ),
    "optimizer": ("test_optimizer.py",),
    "checkpoint": (f"{_CKPT}/test_fp8.py",),
}

# Not run in any mode.
LEFT_OUT_ON_CPU = {
    "test_routers.py::test_router_gating_linear": "products that take a CPU minutes; no code of ours is near",
}
LEFT_OUT_ON_GPU = {
    "test_serialization.py::TestSerialization::test_remove_sharded_tensors": (
        "each rank removes the folder that all read, and they start together here"
    ),
    "test_mlp_glu.py::TestParallelMLPWithGLU::test_oom_is_handled": "fills a GPU, which ranks share here",
}

# Tests of what the extension promises to do otherwise; the first failed assertion is about that alone.
NOT_WHEN_ACTIVE = {
    "test_a2a_token_dispatcher.py::TestAlltoAllDispatcher::test_capacity_padding_forward_backward": (
        "counts what pads an expert to its capacity, which the deduplicating dispatcher neither sends nor computes"
    ),
}
