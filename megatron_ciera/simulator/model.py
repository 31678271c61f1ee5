"""Parameters, FLOPs, bytes and memory of one GPU's part of a transformer layer. Formulas in docs/simulator.md."""

from dataclasses import dataclass

from megatron_ciera.simulator.hardware import Hardware
from megatron_ciera.simulator.job import Job

_BF16 = 2
# Elementwise passes over [tokens, hidden] in a forward pass: norms, residuals, rotary embedding, dropout; and the
# permutation, activation and weighting of rows around the experts, for each row.
_PASSES, _PASSES_PER_ROW = 16, 8
_KERNELS_ATTENTION, _KERNELS_FFN = 16, 24


@dataclass(frozen=True)
class LayerParameters:
    """Values on one GPU: what all data-parallel ranks share, and its experts."""

    dense: int
    expert: int


def layer_parameters(job: Job, layer: int) -> LayerParameters:
    """Parameters of layer `layer` on one GPU."""
    attention = job.hidden * job.head_width * (2 * job.heads + 2 * job.query_groups)
    matrices = 3 if job.gated else 2
    if not job.is_moe[layer]:
        return LayerParameters((attention + matrices * job.hidden * job.ffn) // job.tensor, 0)
    router = job.hidden * job.num_experts
    shared = matrices * job.hidden * job.shared_ffn
    experts = matrices * job.hidden * job.expert_ffn * job.num_experts
    return LayerParameters(
        (attention + shared) // job.tensor + router, experts // (job.expert * job.expert_tensor)
    )


def embedding_parameters(job: Job) -> int:
    """Values of one embedding matrix, or the output layer, on one GPU."""
    return job.vocab * job.hidden // job.tensor


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one forward pass of one micro-batch: attention with its norm; router, permutation and shared
    experts; the experts themselves (a dense layer's FFN counts as `experts`)."""

    attention: float
    router: float
    experts: float


def layer_times(job: Job, layer: int, gpu: Hardware, rank_load: float = 1.0) -> LayerTimes:
    """Forward times of layer `layer` on one GPU.

    rank_load: tokens of the busiest rank over the mean; everyone waits for it.
    """
    tokens = job.micro_batch * job.sequence
    row = job.hidden * _BF16
    projections = 2 * tokens * job.hidden * job.head_width * (2 * job.heads + 2 * job.query_groups)
    scores = (
        2 * tokens * job.sequence * job.head_width * job.heads
    )  # causal: half of 4 × tokens × sequence × width
    attention = gpu.seconds(
        (projections + scores) / job.tensor, _PASSES * job.tokens * row, _KERNELS_ATTENTION
    )
    matrices = 3 if job.gated else 2
    if not job.is_moe[layer]:
        flops = 2 * tokens * matrices * job.hidden * job.ffn / job.tensor
        return LayerTimes(attention, 0.0, gpu.seconds(flops, 0.0, _KERNELS_FFN // 2))
    shared = 2 * tokens * matrices * job.hidden * job.shared_ffn / job.tensor
    router = 2 * job.tokens * job.hidden * job.num_experts
    rows = job.tokens * job.topk * rank_load
    weights = layer_parameters(job, layer).expert * _BF16
    experts = 2 * rows * matrices * job.hidden * job.expert_ffn / job.expert_tensor
    return LayerTimes(
        attention,
        gpu.seconds(router + shared, _PASSES_PER_ROW * rows * row / 2, _KERNELS_FFN // 2),
        gpu.seconds(experts, weights + _PASSES_PER_ROW * rows * row / 2, _KERNELS_FFN // 2),
    )


def output_time(job: Job, gpu: Hardware) -> float:
    """Forward time of the output layer and loss of one micro-batch."""
    tokens = job.micro_batch * job.sequence
    logits = tokens * job.vocab / job.tensor
    return gpu.seconds(2 * logits * job.hidden, 3 * 4 * logits, 8)


def stage_layers(job: Job, stage: int) -> range:
    """Layers of a pipeline stage."""
    each = job.num_layers // job.pipeline
    return range(stage * each, (stage + 1) * each)


def stage_parameters(job: Job, stage: int) -> LayerParameters:
    """Values on one GPU of a stage, embeddings included."""
    layers = [layer_parameters(job, layer) for layer in stage_layers(job, stage)]
    matrices = int(stage == 0)
    if stage == job.pipeline - 1 and not (job.tied_embeddings and stage == 0):
        matrices += 1
    dense = sum(layer.dense for layer in layers) + matrices * embedding_parameters(job)
    return LayerParameters(dense, sum(layer.expert for layer in layers))


def optimizer_time(job: Job, stage: int, gpu: Hardware) -> float:
    """Adam on own shards: reads gradient, master and moments, writes master, moments and bf16: 30 bytes a value."""
    held = stage_parameters(job, stage)
    return gpu.seconds(0.0, 30 * (held.dense / job.data + held.expert / job.expert_data), 50)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU of the first stage."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    shadow: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.shadow


def memory(job: Job, compressed: bool) -> Memory:
    """Weights and gradients whole, optimizer state sharded, activations of the micro-batches in flight.

    Activations: 34 bytes × tokens × width a layer (2 with full recompute) and 8 a row of the experts; a rough rule.
    """
    held = stage_parameters(job, 0)
    values = held.dense + held.expert
    shard = held.dense / job.data + held.expert / job.expert_data
    layers = len(stage_layers(job, 0))
    in_flight = min(job.pipeline, job.micro_batches)
    per_token = 2 if job.recompute else 34 + 8 * job.topk * any(job.is_moe)
    return Memory(
        parameters=2.0 * values,
        gradients=float(job.grad_bytes * values),
        optimizer=12.0 * shard,
        activations=per_token * job.tokens * job.hidden * layers * in_flight,
        shadow=2.0 * shard if compressed else 0.0,
    )
