"""The feature on Megatron's own DDP and distributed optimizer, in one process world of two, beside a plain twin."""

import copy
import dataclasses

import pytest
import torch

from tests.param_gather.gather_world import SMALL, run_world


def _megatron():
    from megatron_ciera import cpu

    cpu.install()
    from megatron.core import parallel_state

    cpu.install_megatron_patches()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


class Net(torch.nn.Module):
    """Two layers named as Megatron names them, and a frozen one."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.self_attention = torch.nn.Linear(96, 96, bias=False)
        self.mlp = torch.nn.Linear(96, 192, bias=False)
        self.frozen = torch.nn.Linear(96, 96, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.02).bfloat16()
        self.frozen.weight.requires_grad = False

    def forward(self, x):
        return self.mlp(self.frozen(self.self_attention(x)))


def _ddp(overlap: bool, config=None, **options):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    config = config or {}
    model = TransformerConfig(num_layers=1, hidden_size=96, num_attention_heads=1, bf16=True)
    for name, value in config.items():
        setattr(model, name, value)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_param_gather=overlap,
        overlap_grad_reduce=overlap,
        bucket_size=10000,
        grad_reduce_in_fp32=True,
    )
    for name, value in options.items():
        setattr(settings, name, value)
    return DistributedDataParallel(model, settings, Net())


class Trainer:
    """A model, its optimizer, and `--ciera` attached to it or not."""

    def __init__(self, overlap: bool, ciera: bool, **flags):
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from megatron_ciera.flags import CieraConfig
        from megatron_ciera.param_gather.feature import ParamGatherFeature

        self.ddp = _ddp(overlap)
        self.log: list[str] = []
        self.feature = None
        if ciera:
            config = CieraConfig(ciera=True, ciera_warmup_iters=2, **flags)
            self.feature = ParamGatherFeature(config, dataclasses.replace(SMALL, piece_bytes=8192))
            self.feature.run = type("Run", (), {"log": self.log.append})()
            self.feature.model_built([self.ddp])
        settings = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True, overlap_param_gather=overlap
        )
        self.optimizer = get_megatron_optimizer(settings, [self.ddp])
        if ciera:
            self.feature.optimizer_built([self.ddp], self.optimizer)
        self.random = torch.Generator().manual_seed(5)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.ddp.zero_grad_buffer()
        batch = torch.randn(4, 96, generator=self.random).bfloat16()
        self.ddp(batch).float().square().mean().backward()
        self.ddp.finish_grad_sync()
        self.optimizer.step()

    def words(self) -> list[torch.Tensor]:
        return [p.detach().clone().view(torch.int16) for p in self.ddp.parameters()]

    def counts(self) -> dict:
        return self.feature.metrics()


def _same(a: Trainer, b: Trainer) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.words(), b.words(), strict=True))


def _sync(trainer: Trainer) -> None:
    trainer.ddp.start_param_sync(force_sync=True)


def _twins(overlap: bool) -> dict:
    plain, ciera = Trainer(overlap, False), Trainer(overlap, True)
    seen = {"same": [], "counts": []}

    def both(action):
        action(plain)
        action(ciera)
        seen["same"].append(_same(plain, ciera))
        seen["counts"].append(ciera.counts())

    for _ in range(4):
        both(Trainer.step)
    both(_sync)  # finishes what is outstanding, or gathers what is due
    both(_sync)  # nothing new
    for action in (_reload, _load_state, lambda trainer: trainer.ddp.broadcast_params()):
        both(action)
        both(Trainer.step)
        both(_sync)
    storage = [p.data_ptr() for p in ciera.ddp.parameters()]
    with torch.inference_mode():
        both(_sync)
    both(Trainer.step)
    both(_sync)
    seen["moved"] = storage != [p.data_ptr() for p in ciera.ddp.parameters()]
    seen["log"] = ciera.log
    return seen


def _reload(trainer: Trainer) -> None:
    """A reload after which the words may be others; CPU memory cannot be given up and taken back."""
    _sync(trainer)
    for buffer in trainer.ddp.buffers:
        buffer.reload_from_cpu()


def _load_state(trainer: Trainer) -> None:
    state = copy.deepcopy(trainer.ddp.module.state_dict())
    for value in state.values():
        value.mul_(1.5)
    trainer.ddp.module.load_state_dict(state)
    trainer.optimizer.reload_model_params()


def _reasons() -> dict:
    from megatron_ciera.param_gather import adapter

    def reasons(ddp):
        return sorted({str(found.raw_reason) for found in adapter.find_groups([ddp])})

    return {
        "plain": reasons(_ddp(True)),
        "order": [found.name for found in adapter.find_groups([_ddp(True)])],
        "order without overlap": [found.name for found in adapter.find_groups([_ddp(False)])],
        "graph": reasons(_ddp(True, {"cuda_graph_impl": "full_iteration"})),
        "qk clip": reasons(_ddp(True, {"qk_clip": True})),
        "mxfp8": _with_setting(reasons, reuse_grad_buf_for_mxfp8_param_ag=True),
        "layer-wise": _with_setting(reasons, use_distributed_optimizer=False),
        "fp8": _with_dtype(reasons),
        "registered": adapter.uses_registered_buffers([_registered()]),
    }


def _with_setting(reasons, **settings):
    ddp = _ddp(True)
    for name, value in settings.items():
        setattr(ddp.ddp_config, name, value)
    return reasons(ddp)


def _with_dtype(reasons):
    ddp = _ddp(True)
    for group in ddp.bucket_groups:
        for bucket in group.buckets:
            bucket.param_data = bucket.param_data.view(torch.uint8)
    return reasons(ddp)


def _registered():
    ddp = _ddp(True)
    ddp.ddp_config.nccl_ub = True
    return ddp


def _body(rank):
    _megatron()
    return {"overlap": _twins(True), "plain": _twins(False), "reasons": _reasons(), "budget": _no_budget()}


def _no_budget() -> dict:
    plain, ciera = Trainer(False, False), Trainer(False, True, ciera_cache_budget_mb=0.0)
    for _ in range(4):
        plain.step()
        ciera.step()
    return {"same": _same(plain, ciera), "counts": ciera.counts()}


@pytest.fixture(scope="module")
def world():
    return run_world(2, _body, kept=False)


@pytest.mark.parametrize("name", ["overlap", "plain"])
def test_bits_equal_a_plain_twin_through_everything(world, name):
    for found in world:
        assert all(found[name]["same"]), found[name]["same"]
        assert not found[name]["moved"]


@pytest.mark.parametrize("name", ["overlap", "plain"])
def test_what_was_sent(world, name):
    first, second = (found[name]["counts"] for found in world)
    assert first == second
    assert sum(counts["ciera/coded_gathers"] for counts in first[:5]) > 0
    assert first[5]["ciera/bytes_sent"] == 0 and first[5]["ciera/unchanged"] > 0
    for rewritten in (6, 9, 12):  # reload, load_state_dict, broadcast_params
        after = first[rewritten : rewritten + 3]
        assert sum(counts["ciera/raw_fallbacks/invalidated"] for counts in after) > 0
    assert sum(counts["ciera/raw_fallbacks"] for counts in first[15:]) == 0
    assert sum(counts["ciera/coded_gathers"] for counts in first[15:]) > 0


def test_selection_is_announced(world):
    assert any("selection goes by bytes alone" in line for line in world[0]["plain"]["log"])
    assert any(
        line.startswith("selection, dense buckets of optimizer 0") for line in world[0]["plain"]["log"]
    )


def test_budget_of_nothing_compresses_nothing(world):
    for found in world:
        assert found["budget"]["same"]
        counts = found["budget"]["counts"]
        assert counts["ciera/coded_gathers"] == 0 and counts["ciera/state_mb"] == 0
        assert counts["ciera/raw_fallbacks"] == 0


def test_groups_are_found_in_the_order_of_their_gathers(world):
    reasons = world[0]["reasons"]
    assert reasons["plain"] == ["None"]
    assert len(reasons["order"]) > 1
    assert reasons["order"] == sorted(reasons["order"], reverse=True)
    assert reasons["order without overlap"] == sorted(reasons["order without overlap"])


@pytest.mark.parametrize(
    "name, text",
    [
        ("graph", "--cuda-graph-impl full_iteration"),
        ("mxfp8", "--reuse-grad-buf-for-mxfp8-param-ag"),
        ("layer-wise", "the layer-wise optimizer gathers parameters of uneven sizes"),
        ("fp8", "parameter buffer of torch.uint8"),
    ],
)
def test_raw_for_good(world, name, text):
    (reason,) = world[0]["reasons"][name]
    assert text in reason


def test_qk_clip_leaves_raw_what_holds_attention_weights(world):
    reasons = world[0]["reasons"]["qk clip"]
    assert reasons[0].startswith("--qk-clip") and reasons[1:] == ["None"]


def test_registered_buffers_are_noticed(world):
    assert world[0]["reasons"]["registered"]
