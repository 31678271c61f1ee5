"""The recorder as a feature of the run: which iterations, which groups, and what the features say of themselves."""

import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args

from megatron_ciera.feature import Feature
from megatron_ciera.flags import CieraConfig
from megatron_ciera.record.chrome import TraceFile
from megatron_ciera.record.clock import make_clock
from megatron_ciera.record.tap import Marks, Tap

# Iterations whose CUDA events may be unread; more than this, and the oldest is read with a wait.
_UNREAD = 4
_SETTINGS = (
    *("num_layers", "hidden_size", "num_experts", "moe_router_topk", "seq_length", "micro_batch_size"),
    *("global_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "overlap_param_gather", "lr"),
    *("bf16", "fp8", "fp8_param_gather", "fp4", "fp4_param_gather"),
)
_ROLES = (
    ("tensor", parallel_state.get_tensor_model_parallel_group),
    ("pipeline", parallel_state.get_pipeline_model_parallel_group),
    ("expert", parallel_state.get_expert_model_parallel_group),
    ("data", lambda: parallel_state.get_data_parallel_group(with_context_parallel=True)),
    ("expert data", parallel_state.get_expert_data_parallel_group),
    # Counts of tokens go here, with one member for each expert-parallel rank if experts are not tensor-parallel.
    ("expert", parallel_state.get_expert_tensor_and_model_parallel_group),
)


class RecordFeature(Feature):
    """Writes one trace file a rank into the folder PATH of `--ciera-record`."""

    def __init__(self, config: CieraConfig):
        self.config = config
        self.name = f"recorder (--ciera-record {config.ciera_record})"
        self._unwritten: deque[Marks] = deque()
        self._tap: Tap | None = None

    def model_built(self, model_chunks: list) -> None:
        if self._tap is not None:
            return
        self._clock = make_clock()
        self._file = TraceFile(
            Path(self.config.ciera_record), dist.get_rank(), self._header(), group_roles(self._per_node())
        )
        self._tap = Tap(self._clock)
        self._tap.install()
        times = (
            "host times: the work itself on CPU" if self._clock.name == "host" else "CUDA events, read late"
        )
        self.run.log(f"--ciera-record: one file a rank in {self.config.ciera_record}, {times}")

    def before_step(self, iteration: int) -> None:
        self._tap.start(iteration)

    def after_step(self, iteration: int) -> None:
        self._unwritten.append(self._tap.stop())
        self._write_read()
        if len(self._unwritten) > _UNREAD:
            self._write_all()

    def logged(self, iteration: int, values: Mapping[str, float]) -> None:
        """Counts since the last log, with change rates by class where a feature measured them."""
        self._write_read()
        extra = {}
        for peer in self.peers:
            extra.update(peer.measured_rates())
        self._file.values(iteration, {**values, **extra})

    def finished(self) -> None:
        if self._tap is None:
            return
        self._tap.remove()
        self._write_all()
        self._file.close()
        self.run.log(f"--ciera-record: {self._file.path.parent} is complete")

    def _write_read(self) -> None:
        while self._unwritten and self._is_read(self._unwritten[0]):
            self._file.iteration(self._unwritten.popleft(), self._clock)

    def _write_all(self) -> None:
        self._clock.synchronize()
        while self._unwritten:
            self._file.iteration(self._unwritten.popleft(), self._clock)

    def _is_read(self, marks: Marks) -> bool:
        calls = [event[2] for event in marks.events if event[0] == "launch"]
        return self._clock.is_read(marks.end) and all(
            call.ended is not None and self._clock.is_read(call.ended) for call in calls
        )

    def _per_node(self) -> int:
        if self.config.cluster is not None:
            return self.config.cluster.gpus_per_node
        return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))

    def _header(self) -> dict:
        args = get_args()
        cluster = self.config.cluster
        return {
            "clock": self._clock.name,
            "world": dist.get_world_size(),
            "ranks_per_node": self._per_node(),
            "features": [
                name
                for name, on in (
                    ("ciera", self.config.ciera),
                    ("dedup", self.config.dedup_dispatch),
                    ("placement", self.config.correlated_placement),
                    ("shuffle", self.config.token_shuffle),
                )
                if on
            ],
            "settings": {name: getattr(args, name, None) for name in _SETTINGS},
            "device": torch.cuda.get_device_name() if self._clock.name == "cuda" else "CPU",
            "cluster": cluster and {"gpu": cluster.gpu, "nodes": cluster.nodes},
        }


def group_roles(ranks_per_node: int) -> dict[str, dict]:
    """Name of each process group of this rank that Megatron made: {"role", "per_node"}.

    per_node: members on the node of the group's first rank.
    """
    roles = {}
    for role, get in _ROLES:
        group = get()
        ranks = dist.get_process_group_ranks(group)
        near = sum(rank // ranks_per_node == ranks[0] // ranks_per_node for rank in ranks)
        roles.setdefault(group.group_name, {"role": role, "per_node": near})
    return roles
