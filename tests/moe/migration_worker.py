"""Experts moved there and back with their optimizer state, on four processes (EP 2, expert data parallel 2).

On two GPUs: two processes, EP 2; layers as in layer_worker.py. torchrun … migration_worker.py OUT: rank 0 writes
OUT/results.json = {case: {check: bool or text}}.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

from megatron_ciera import cpu  # noqa: E402

if cpu.is_needed():
    cpu.install()
    cpu.install_megatron_patches()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from layer_worker import HIDDEN, build  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from names import TRANSFORMER_ENGINE  # noqa: E402

from megatron_ciera.moe.agreement import agree  # noqa: E402
from megatron_ciera.moe.groups import make_expert_group  # noqa: E402
from megatron_ciera.moe.layer import attach_placement  # noqa: E402
from megatron_ciera.moe.optimizer_state import OptimizerState  # noqa: E402
from megatron_ciera.moe.placements import PlacementInForce  # noqa: E402
from megatron_ciera.moe.recorder import RouteRecorder  # noqa: E402
from megatron_ciera.moe.refit import Refit  # noqa: E402
from megatron_ciera.moe.schedule import FitSchedule  # noqa: E402
from megatron_ciera.moe.sites import families, find_sites  # noqa: E402
from placement.file import DECODER, LayerId  # noqa: E402

EXPERTS, LAYERS = 8, 2
CASES = {
    "bf16, distributed optimizer": {"use_distributed_optimizer": True},
    "bf16, overlapped gather in small buckets": {
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
        "bucket_size": 5000,
    },
    "bf16, every rank holds all state": {"use_distributed_optimizer": False},
}
if TRANSFORMER_ENGINE:
    CASES["precision-aware optimizer"] = {
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
    }
PRECISE = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": torch.bfloat16,
    "exp_avg_sq_dtype": torch.bfloat16,
}


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(build(2, EXPERTS, {}) for _ in range(LAYERS))
        for number, layer in enumerate(self.layers):
            layer.set_layer_number(number + 1)

    def forward(self, hidden):
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        return hidden


def make(options, precise):
    torch.manual_seed(1)
    stack = Stack().bfloat16().to(torch.cuda.current_device())
    config = stack.layers[0].config
    model = DistributedDataParallel(config, DistributedDataParallelConfig(**options), stack)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=0.0,
            use_distributed_optimizer=options["use_distributed_optimizer"],
            overlap_param_gather=options.get("overlap_param_gather", False),
            **(PRECISE if precise else {}),
        ),
        [model],
    )
    return model, optimizer


def train(model, optimizer, steps):
    for number in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        hidden = torch.randn(24, 2, HIDDEN, generator=generator).bfloat16()
        hidden = hidden.to(torch.cuda.current_device())
        model(hidden).float().pow(2).sum().backward()
        model.finish_grad_sync()
        optimizer.step()
    if model.ddp_config.overlap_param_gather:
        model.start_param_sync(force_sync=True)


def state_bits(model, optimizer, maps):
    """Digests of everything that belongs to experts, gathered over ranks, by (layer, expert, name, position)."""
    state = OptimizerState(optimizer)
    mine = {}
    for site in find_sites([model]):
        first = parallel_state.get_expert_model_parallel_rank() * site.num_local_experts
        for family in families(site):
            for place in range(site.num_local_experts):
                expert = int(maps[site.layer_id][first + place])
                key = (site.layer_id.layer, expert, family.name)
                mine[*key, "weight"] = digest(family.value(place))
                piece = state.piece(family.owners[place][0])
                for name, values in piece.states.items() if piece else ():
                    for offset, value in enumerate(values.tolist(), start=piece.start):
                        mine[*key, name, offset] = float(value).hex()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found = {}
    for part in everyone:
        for key, value in part.items():
            found.setdefault(key, set()).add(value)
    assert all(len(values) == 1 for values in found.values()), "replicas differ"
    return found


def local_bits(model, optimizer):
    """Every byte of this rank's parameters and optimizer state, as it lies."""
    state = OptimizerState(optimizer)
    parts = []
    for parameter in model.parameters():
        parts.append(digest(parameter.data))
        piece = state.piece(parameter)
        parts += [digest(value) for value in piece.states.values()] if piece else []
    return parts


def digest(tensor):
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def everywhere(value: bool) -> bool:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(everyone)


def run(name, options):
    model, optimizer = make(options, "precision-aware" in name)
    sites = find_sites([model])
    mappings = {site.layer_id: attach_placement(site.layer) for site in sites}
    ids = [site.layer_id for site in sites]
    placement = PlacementInForce(sites, mappings, ids, EXPERTS, make_expert_group())
    train(model, optimizer, 2)
    rng = np.random.default_rng(4)
    maps = {layer_id: rng.permutation(EXPERTS) for layer_id in ids}
    before, by_expert = local_bits(model, optimizer), state_bits(model, optimizer, placement.maps)
    results = {"failed_layer": failure(placement, maps, optimizer)}
    results["failure_wrote_nothing"] = everywhere(before == local_bits(model, optimizer))
    results["failure_kept_maps"] = all((m == np.arange(EXPERTS)).all() for m in placement.maps.values())
    received = placement.move_to(maps, OptimizerState(optimizer))
    results["moved_something"] = everywhere(received > 0 and before != local_bits(model, optimizer))
    results["every_expert_keeps_its_bits"] = by_expert == state_bits(model, optimizer, maps)
    results["masters_and_moments"] = sorted({key[3] for key in by_expert})
    results["mapping_is_the_map"] = all(mappings[i].tolist() == maps[i].tolist() for i in ids)
    placement.move_to({}, OptimizerState(optimizer))
    results["back_to_every_bit"] = everywhere(before == local_bits(model, optimizer))
    return results


def failure(placement, maps, optimizer):
    """One rank cannot read its optimizer state: every rank must say so and nothing may be written."""

    class Broken(OptimizerState):
        def piece(self, parameter):
            raise MemoryError("no room for staging")

    state = Broken(optimizer) if dist.get_rank() == 1 else OptimizerState(optimizer)
    try:
        placement.move_to(maps, state)
    except ValueError as error:
        text = str(error)
    else:
        text = "no error"
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return everyone[0] if len(set(everyone)) == 1 else everyone


def broken_recorder():
    """One rank cannot read what it recorded: every rank gets the reason as the fit's answer, none waits."""
    layer_id = LayerId(DECODER, 0)
    recorder = RouteRecorder(2)
    world = dist.get_world_size()
    refit = Refit(FitSchedule(1, 0), {layer_id: recorder}, [layer_id], 64, world, lambda: None, print)
    refit.before_step(1)
    recorder.add(torch.eye(8, dtype=torch.bool))
    if dist.get_rank() == 1:
        recorder.add(torch.eye(4, dtype=torch.bool))
    first = refit.after_step(1)
    return first is None, refit.finish().failure


def another_file():
    """One rank read another placement file."""
    try:
        agree("--placement-file p", "b" if dist.get_rank() == 1 else "a", None, "needs the same file")
    except ValueError as error:
        return str(error)
    return "no error"


def gathered(value):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def main(out: Path) -> None:
    if not cpu.is_needed():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if cpu.is_needed() else "nccl")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    results = {name: run(name, options) for name, options in CASES.items()}
    alike = {"recorder": gathered(broken_recorder()), "file": gathered(another_file())}
    if dist.get_rank() == 0:
        (out / "results.json").write_text(json.dumps(results))
        (out / "alike.json").write_text(json.dumps(alike))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
