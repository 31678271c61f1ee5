"""The model, data and loss of pretrain_gpt.py. Imported after `prepare()`."""

from functools import partial

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_and_validate_args,
)
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

BATCH = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}


def needs_batch(vp_stage: int | None) -> bool:
    """Whether this rank's model chunk reads tokens or labels."""
    return is_first_or_last_pipeline_stage(vp_stage) or _has_mtp(vp_stage)


def get_batch(data_iterator, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """The micro-batch, `[micro_batch, sequence / context_parallel]` each, read once per tensor-parallel group."""
    if not needs_batch(vp_stage):
        return dict.fromkeys(BATCH)
    args, source = get_args(), mpu.get_tensor_model_parallel_src_rank()
    shape = (args.micro_batch_size, args.seq_length)
    reads = mpu.get_tensor_model_parallel_rank() == 0
    sample = next(data_iterator) if reads else {}
    batch = {}
    for name, dtype in BATCH.items():
        if reads:
            batch[name] = sample[name].cuda(non_blocking=True)
        else:
            batch[name] = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        torch.distributed.broadcast(batch[name], source, group=mpu.get_tensor_model_parallel_group())
    if args.context_parallel_size > 1:
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
        )
    return batch


def loss_func(loss_mask: torch.Tensor, output: torch.Tensor):
    """Summed token losses, the number of tokens, and both for Megatron's report."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model, return_schedule_plan: bool = False):
    """One micro-batch through the model, or its schedule plan for overlapped expert communication."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    loss_mask = batch.pop("loss_mask")
    inputs = (batch["tokens"], batch["position_ids"], None)
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(*inputs, labels=batch["labels"], loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def datasets_provider(num_samples, vp_stage: int | None = None):
    """Train, validation and test datasets for `num_samples` of each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    built_here = partial(_builds_dataset, vp_stage)
    kind = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, built_here, config).build()


def _builds_dataset(vp_stage: int | None) -> bool:
    return mpu.get_tensor_model_parallel_rank() == 0 and needs_batch(vp_stage)


def _has_mtp(vp_stage: int | None) -> bool:
    config = core_transformer_config_from_args(get_args())
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def train() -> None:
    """Megatron's `pretrain` on its command line."""
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    datasets_provider.is_distributed = True
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)
