"""The part of a config that decides how long a step takes, read from its flags without Megatron."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from megatron_ciera.cluster import Cluster
from megatron_ciera.errors import refuse
from megatron_ciera.simulator.network import Group, strided
from megatron_ciera.yaml_config import RunConfig

_UNSUPPORTED = {
    "--context-parallel-size": "1",
    "--virtual-pipeline-model-parallel-size": "1",
    "--num-layers-per-virtual-pipeline-stage": "",
}

_OTHER_PRECISIONS = ("--fp8-format", "--fp8-param-gather", "--fp4-format", "--fp4-param-gather")


@dataclass(frozen=True)
class Job:
    """A model, its layout on `world` GPUs and its batch. `is_moe[l]`: whether layer l has experts."""

    num_layers: int
    hidden: int
    heads: int
    query_groups: int
    head_width: int
    ffn: int
    gated: bool
    vocab: int
    tied_embeddings: bool
    is_moe: tuple[bool, ...]
    num_experts: int
    topk: int
    expert_ffn: int
    shared_ffn: int
    sequence: int
    micro_batch: int
    micro_batches: int
    recompute: bool
    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    world: int
    gpus_per_node: int
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    grad_bytes: int
    learning_rate: float

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.pipeline)

    @property
    def expert_data(self) -> int:
        return self.world // (self.expert * self.expert_tensor * self.pipeline)

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch whose rows a GPU owns (sequence parallel)."""
        return self.micro_batch * self.sequence // self.tensor

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch * self.micro_batches * self.data * self.sequence

    def groups(self) -> dict[str, Group]:
        """Process groups of one rank, laid out as Megatron orders ranks: tensor, expert, data, pipeline."""
        node = self.gpus_per_node
        return {
            "tensor": strided(self.tensor, 1, node),
            "expert": strided(self.expert, self.expert_tensor, node),
            "data": strided(self.data, self.tensor, node),
            "expert data": strided(self.expert_data, self.expert * self.expert_tensor, node),
        }

    def on(self, gpus: int) -> "Job":
        """The same job on `gpus` GPUs: more data parallelism, the same work for each GPU."""
        unit = self.pipeline * max(self.tensor, self.expert * self.expert_tensor)
        if gpus < unit or gpus % unit:
            raise refuse(
                "--gpus",
                gpus,
                f"a multiple of {unit} (pipeline {self.pipeline} × the larger of tensor {self.tensor} and expert "
                f"{self.expert} × {self.expert_tensor})",
                "Leave this number out, or change the config's parallel sizes.",
            )
        return replace(self, world=gpus, gpus_per_node=min(self.gpus_per_node, gpus))


def job_from_config(config: RunConfig, from_trace: bool = False) -> Job:
    """Reads `config`, for the world size that its `cluster:` section describes.

    from_trace: computation and bytes are those of a trace, so that other precisions than bf16 may be in the config.

    Raises:
        ConfigurationError: no cluster section, or a setting that the simulator does not model.
    """
    if config.cluster is None:
        raise refuse(
            "--config", f"{config.path} without `cluster:`", "one", "Add it; configs/ of a clone has some."
        )
    flags = _Flags(config.flags)
    if not from_trace:
        _check_precision(flags)
    return _job(flags, config.cluster)


class _Flags:
    def __init__(self, flags: Mapping[str, list[str] | None]):
        self.flags = flags
        for flag, accepted in _UNSUPPORTED.items():
            found = self.text(flag)
            if found not in (None, accepted):
                raise refuse(
                    flag, found, "a run without it in the simulator", f"Remove {flag} from the config."
                )

    def given(self, flag: str) -> bool:
        return flag in self.flags

    def text(self, flag: str, default: str | None = None) -> str | None:
        values = self.flags.get(flag)
        return values[0] if values else default

    def number(self, flag: str, default: int | None = None) -> int:
        found = self.text(flag)
        if found is None:
            if default is None:
                raise refuse(flag, "nothing in the config", "a number", f"Add {flag[2:]} under `megatron:`.")
            return default
        return int(found)


def _check_precision(flags: _Flags) -> None:
    """Products, weights, activations and gathers are counted in bf16."""
    way_out = "or record the run with --ciera-record and give --trace."
    for flag in _OTHER_PRECISIONS:
        if flags.given(flag):
            found = flags.text(flag, "it set")
            raise refuse(
                flag, found, "a run in bf16 in the simulator", f"Remove {flag} from the config, {way_out}"
            )
    if not flags.given("--bf16"):
        found = "--fp16" if flags.given("--fp16") else "neither it nor --fp16 (fp32)"
        raise refuse("--bf16", found, "it in the simulator", f"Set bf16: true under `megatron:`, {way_out}")


def _job(flags: _Flags, cluster: Cluster) -> Job:
    layers, hidden = flags.number("--num-layers"), flags.number("--hidden-size")
    heads = flags.number("--num-attention-heads")
    world = cluster.nodes * cluster.gpus_per_node
    tensor = flags.number("--tensor-model-parallel-size", 1)
    pipeline = flags.number("--pipeline-model-parallel-size", 1)
    micro_batch = flags.number("--micro-batch-size")
    ffn = flags.number("--ffn-hidden-size", 4 * hidden)
    experts = flags.number("--num-experts", 0)
    grouped = flags.given("--group-query-attention")
    expert = flags.number("--expert-model-parallel-size", 1)
    expert_tensor = flags.number("--expert-tensor-parallel-size", tensor)
    if experts and expert_tensor > 1:
        raise refuse(
            "--expert-tensor-parallel-size",
            expert_tensor,
            "1 in the simulator (Megatron's default is --tensor-model-parallel-size)",
            "Set expert-tensor-parallel-size: 1 in the config.",
        )
    if expert > 1 and flags.text("--moe-token-dispatcher-type") != "alltoall":
        found = flags.text("--moe-token-dispatcher-type", "nothing (allgather)")
        raise refuse(
            "--moe-token-dispatcher-type", found, "alltoall in the simulator", "Set it in the config."
        )
    batch = flags.number("--global-batch-size")
    per_step = micro_batch * (world // (tensor * pipeline))
    if not per_step or batch % per_step or not batch:
        raise refuse(
            "--global-batch-size",
            batch,
            f"a multiple of {per_step or micro_batch} (micro batch {micro_batch} × data parallel size, on {world} "
            f"GPUs with tensor {tensor} and pipeline {pipeline})",
            "Change it in the config, or the parallel sizes, or the `cluster:` section.",
        )
    if layers % pipeline:
        raise refuse("--num-layers", layers, f"a multiple of {pipeline} (pipeline)", "Change one of the two.")
    return Job(
        num_layers=layers,
        hidden=hidden,
        heads=heads,
        query_groups=flags.number("--num-query-groups", heads) if grouped else heads,
        head_width=flags.number("--kv-channels", hidden // heads),
        ffn=ffn,
        gated=flags.given("--swiglu"),
        vocab=flags.number("--vocab-size") + 1,
        tied_embeddings=not flags.given("--untie-embeddings-and-output-weights"),
        is_moe=_moe_layers(flags.text("--moe-layer-freq", "1"), layers, experts),
        num_experts=experts,
        topk=flags.number("--moe-router-topk", 2),
        expert_ffn=flags.number("--moe-ffn-hidden-size", ffn),
        shared_ffn=flags.number("--moe-shared-expert-intermediate-size", 0),
        sequence=flags.number("--seq-length"),
        micro_batch=micro_batch,
        micro_batches=batch // per_step,
        recompute=flags.text("--recompute-granularity") == "full",
        tensor=tensor,
        pipeline=pipeline,
        expert=expert,
        expert_tensor=expert_tensor,
        world=world,
        gpus_per_node=cluster.gpus_per_node,
        overlap_grad_reduce=flags.given("--overlap-grad-reduce"),
        overlap_param_gather=flags.given("--overlap-param-gather"),
        grad_bytes=2 if flags.given("--grad-reduce-in-bf16") else 4,
        learning_rate=float(flags.text("--lr", "1e-4")),
    )


def _moe_layers(pattern: str, layers: int, experts: int) -> tuple[bool, ...]:
    """Megatron's --moe-layer-freq: a number n (every n-th layer), or an expression such as ([0]*1+[1]*27)."""
    if not experts:
        return (False,) * layers
    if pattern.strip().isdigit():
        every = int(pattern)
        return tuple(layer % every == 0 for layer in range(layers))
    flat = []
    for values, times in re.findall(r"\[([^\]]*)\](?:\s*\*\s*(\d+))?", pattern):
        flat += list(ast.literal_eval(f"[{values}]")) * int(times or 1)
    if len(flat) != layers:
        raise refuse(
            "--moe-layer-freq", pattern, f"{layers} entries (--num-layers)", "Write it as ([0]*a+[1]*b)."
        )
    return tuple(bool(value) for value in flat)
