"""An MoE layer in fp32 without dispatch: every rank gathers all experts and computes its own tokens densely."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from names import expert_weights


def gathered_experts(layer) -> dict[str, torch.Tensor]:
    """fp32 leaves: {"fc1": [E, 2F, H], "fc2": [E, H, F]} by slot, equal on all ranks of the EP group."""
    group = parallel_state.get_expert_model_parallel_group()
    leaves = {}
    for name, weights in expert_weights(layer).items():
        local = torch.stack([weight.detach() for weight in weights])
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
        leaves[name] = torch.cat(parts).float().requires_grad_()
    return leaves


def dense_forward(hidden, router_weight, experts, selected, slot_of_expert):
    """[T, H] fp32 tokens -> [T, H]: softmax over the selected logits, then every selected expert in turn.

    selected: [T, E] bool by logical expert. slot_of_expert: [E] where each expert's weights are.
    """
    logits = hidden @ router_weight.T
    probs = torch.softmax(logits.masked_fill(~selected, -torch.inf), dim=1)
    probs = torch.where(selected, probs, 0)
    output = torch.zeros_like(hidden)
    for expert in range(selected.shape[1]):
        slot = slot_of_expert[expert]
        gate, up = (hidden @ experts["fc1"][slot].T).chunk(2, dim=1)
        part = (F.silu(gate) * up * probs[:, expert : expert + 1]) @ experts["fc2"][slot].T
        output = output + torch.where(selected[:, expert : expert + 1], part, 0)
    return output


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative L2 error in fp64."""
    exact = exact.double()
    norm = exact.norm()
    return float((found.double() - exact).norm() / norm) if norm > 0 else float(found.double().norm())
