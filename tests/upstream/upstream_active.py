"""What `active` means: features attached to whatever Megatron's tests build, as their hooks attach them in a run."""

from collections import Counter
from types import SimpleNamespace

import torch

from megatron_ciera.seam import wrap

_counts = Counter()
_features = []


def attach() -> None:
    from megatron.core import optimizer
    from megatron.core.transformer.moe import experts, moe_layer

    wrap(moe_layer.MoELayer, "__init__", ("self", "config"), _with_features)
    for module in (experts.SequentialMLP, experts.TEGroupedMLP):
        wrap(module, "__init__", ("self", "num_local_experts", "config"), _saved_logically)
    wrap(optimizer, "get_megatron_optimizer", ("config", "model_chunks"), _with_compressed_gather)


def counts() -> dict[str, int]:
    """What was attached and how often it did its work, on this rank."""
    for feature in _features:
        ledger = feature.ledger
        for name, value in zip(_LEDGER, ledger.take(_LEDGER), strict=True):
            _counts[name] += int(value)
    return dict(_counts)


_LEDGER = ("raw_gathers", "coded_gathers", "unchanged", "bytes_raw", "bytes_sent")
_inside_layer = False


def _reversed(num_experts: int) -> torch.Tensor:
    return torch.arange(num_experts - 1, -1, -1)


def _with_features(init):
    def __init__(self, *args, **kwargs):
        global _inside_layer
        _inside_layer = True
        try:
            init(self, *args, **kwargs)
        finally:
            _inside_layer = False
        _attach_to_layer(self)

    return __init__


def _attach_to_layer(layer) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from megatron_ciera.moe.layer import attach_dispatcher, attach_placement

    config = layer.config
    stock = layer.token_dispatcher
    takes_dedup = (
        type(stock) is MoEAlltoAllTokenDispatcher
        and stock.tp_size == 1
        and not config.moe_router_padding_for_quantization
    )
    if takes_dedup:
        attach_dispatcher(layer)
        _counts["dispatchers"] += 1
        _count_calls(layer.token_dispatcher)
    attach_placement(layer).copy_(_reversed(config.num_moe_experts))
    _counts["placements"] += 1


def _count_calls(dispatcher) -> None:
    dispatch = dispatcher.token_dispatch

    def token_dispatch(*args, **kwargs):
        _counts["deduplicated dispatches"] += 1
        return dispatch(*args, **kwargs)

    dispatcher.token_dispatch = token_dispatch


def _saved_logically(init):
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if not _inside_layer:
            from megatron_ciera.moe.logical_checkpoint import save_logically

            save_logically(self, _reversed(self.config.num_moe_experts))
            _counts["expert modules"] += 1

    return __init__


def _with_compressed_gather(build):
    def get_megatron_optimizer(config, model_chunks, *args, **kwargs):
        optimizer = build(config, model_chunks, *args, **kwargs)
        _attach_gather(model_chunks, optimizer)
        return optimizer

    return get_megatron_optimizer


def _attach_gather(model_chunks, optimizer) -> None:
    from megatron.core.distributed import DistributedDataParallel

    from megatron_ciera.flags import CieraConfig
    from megatron_ciera.param_gather.feature import ParamGatherFeature

    if not all(
        isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.use_distributed_optimizer
        for chunk in model_chunks
    ):
        return
    feature = ParamGatherFeature(
        CieraConfig(ciera=True, ciera_selection=False, ciera_warmup_iters=0, ciera_verify_interval=1)
    )
    feature.run = SimpleNamespace(log=lambda text: None)
    feature.model_built(model_chunks)
    feature.optimizer_built(model_chunks, optimizer)
    feature.loaded(model_chunks, optimizer, 0)
    feature.before_step(1)
    _features.append(feature)
    _counts["compressed gathers attached"] += 1
