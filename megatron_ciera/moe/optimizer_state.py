"""Which part of a parameter's optimizer state this rank holds, as flat views that can be read and written."""

from dataclasses import dataclass

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

MASTER = "master"


@dataclass(frozen=True, eq=False)
class StatePiece:
    """Values [start, stop) of the flat parameter. `states`: name -> flat tensor of stop - start values."""

    start: int
    stop: int
    states: dict[str, torch.Tensor]


class OptimizerState:
    """Looks up pieces in Megatron's optimizer, however it is chained and sharded.

    Masters that are views of the model's own parameters (fp32 training) are left out: they move with it.
    """

    def __init__(self, optimizer: MegatronOptimizer | None):
        chained = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        self.optimizers = [
            part for part in chained if part is not None and not getattr(part, "is_stub_optimizer", False)
        ]
        self._whole = {}
        for part in self.optimizers:
            if not isinstance(part, DistributedOptimizer):
                for group in part.optimizer.param_groups:
                    for parameter in group["params"]:
                        self._whole[parameter] = part.optimizer

    def piece(self, parameter: torch.nn.Parameter) -> StatePiece | None:
        """This rank's piece of `parameter`, or None. The views are valid until the optimizer is reloaded."""
        for part in self.optimizers:
            if isinstance(part, DistributedOptimizer) and parameter in part.model_param_group_index_map:
                group, order = part.model_param_group_index_map[parameter]
                held = part.optimizer.param_groups[group]["params"][order]
                span = part._get_model_param_range_map(parameter)["param"]
                return _piece(span.start, span.end, held, part.optimizer, parameter)
        held = getattr(parameter, "main_param", parameter)
        if held in self._whole:
            return _piece(0, parameter.numel(), held, self._whole[held], parameter)
        return None

    def steps(self) -> list[float]:
        """Step counts of the groups that hold experts: equal on all ranks of a run."""
        counts = set()
        for part in self.optimizers:
            for group in part.optimizer.param_groups:
                if group["params"] and group.get("is_expert_parallel") and "step" in group:
                    counts.add(float(group["step"]))
        return sorted(counts)


def let_remainders_load(optimizer: MegatronOptimizer) -> None:
    """Lets precision-aware FusedAdam take its state back from checkpoints saved by expert.

    In the place of an fp32 master it keeps the low 16 bits (int16) beside the bf16 parameter. Checkpoints by
    expert hold every state as fp32, which is exact for these whole numbers, but which FusedAdam refuses on load.
    """
    for part in OptimizerState(optimizer).optimizers:
        if getattr(part.optimizer, "store_param_remainders", False):
            part.optimizer.set_scaled_state = _with_whole_numbers(part.optimizer.set_scaled_state)


def _with_whole_numbers(original):
    def set_scaled_state(param, state_name, unscaled_state):
        if (
            state_name == "master_param"
            and param.dtype == torch.bfloat16
            and unscaled_state.dtype == torch.float32
        ):
            unscaled_state = unscaled_state.to(torch.int16)
        return original(param, state_name, unscaled_state)

    return set_scaled_state


def _piece(start, stop, held, inner, parameter) -> StatePiece:
    states = {}
    own_storage = held.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
    if own_storage:
        states[MASTER] = held.data.view(-1)
    for name, value in sorted(inner.state.get(held, {}).items()):
        if isinstance(value, torch.Tensor) and value.numel() == stop - start and value.dim() > 0:
            states[name] = value.view(-1)
    return StatePiece(start, stop, states)
