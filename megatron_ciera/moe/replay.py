"""Recorded routing replayed through real dispatchers: what a benchmark runs, without a model around it.

Experts are columns of a scale matrix (parity) or gated MLPs (timing); the router is a linear layer whose
softmax is taken over the recorded experts, so that its gradient goes through the dispatcher too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from placement.fit import fit_layers


@dataclass(frozen=True, eq=False)
class Inputs:
    """One micro-batch of one layer. hidden, grad: [T, 1, H]; router: [E, H]; routing_map: [T, E] by slot."""

    hidden: torch.Tensor
    grad: torch.Tensor
    router: torch.Tensor
    routing_map: torch.Tensor


def routing_map(top_indices: np.ndarray, physical_to_logical_map: np.ndarray, device) -> torch.Tensor:
    """[T, topk] experts -> [T, E] bool by slot."""
    logical = torch.zeros((len(top_indices), len(physical_to_logical_map)), dtype=torch.bool)
    logical.scatter_(1, torch.from_numpy(np.ascontiguousarray(top_indices, dtype=np.int64)), True)
    return logical[:, torch.from_numpy(np.asarray(physical_to_logical_map))].to(device)


def fitted_maps(fit_tokens: np.ndarray, num_experts: int, num_ranks: int, ranks_per_node: int) -> np.ndarray:
    """[layers, tokens, topk] -> [layers, E] correlated placement; see placement.fit for the rules."""
    result = fit_layers(fit_tokens, num_ranks, ranks_per_node, num_experts=num_experts)
    return np.stack([layer.physical_to_logical_map for layer in result.placement.layers])


def make_inputs(selected: torch.Tensor, hidden_size: int, dtype: torch.dtype, seed: int) -> Inputs:
    """Random tokens for a routing map; the same on every device for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens, experts = selected.shape
    hidden = torch.randn(tokens, 1, hidden_size, generator=generator)
    grad = torch.randn(tokens, 1, hidden_size, generator=generator)
    router = torch.randn(experts, hidden_size, generator=torch.Generator().manual_seed(1)) / hidden_size**0.5
    moved = [tensor.to(selected.device, dtype) for tensor in (hidden, grad, router)]
    return Inputs(*moved, selected)


def probabilities(hidden: torch.Tensor, router: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
    """[T, E]: softmax over the selected experts' logits in fp32 or wider, zero elsewhere; hidden's dtype."""
    logits = (hidden @ router.T).to(torch.promote_types(hidden.dtype, torch.float32))
    probs = torch.softmax(logits.masked_fill(~selected, -torch.inf), dim=1)
    return torch.where(selected, probs, 0).to(hidden.dtype)


def scale_experts(scale: torch.Tensor) -> Callable:
    """Experts that multiply every feature by their row of `scale` ([n, H]) and by the probability."""

    def experts(tokens, tokens_per_expert, probs):
        counts = torch.as_tensor(tokens_per_expert).to(scale.device)
        rows = torch.repeat_interleave(
            torch.arange(len(scale), device=scale.device), counts, output_size=len(tokens)
        )
        return tokens * scale[rows] * probs[:, None].to(tokens.dtype)

    return experts


def mlp_experts(num_local: int, hidden_size: int, ffn: int, dtype, device) -> Callable:
    """Gated MLPs by grouped matrix products, weights fixed: the work between dispatch and combine."""
    generator = torch.Generator().manual_seed(2)
    first = torch.randn(num_local, hidden_size, 2 * ffn, generator=generator) / hidden_size**0.5
    second = torch.randn(num_local, ffn, hidden_size, generator=generator) / ffn**0.5
    first, second = first.to(device, dtype).requires_grad_(), second.to(device, dtype).requires_grad_()

    def experts(tokens, tokens_per_expert, probs):
        ends = torch.as_tensor(tokens_per_expert).cumsum(0).to(device, torch.int32)
        gate, up = torch._grouped_mm(tokens, first, offs=ends).chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up * probs[:, None].to(tokens.dtype)
        return torch._grouped_mm(inner, second, offs=ends)

    return experts


def forward(dispatcher, experts: Callable, hidden: torch.Tensor, probs: torch.Tensor, selected: torch.Tensor):
    """Megatron's six verbs around `experts`, as MoELayer calls them. Returns [T, 1, H]."""
    rows, row_probs = dispatcher.dispatch_preprocess(hidden, selected, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    tokens, counts, token_probs = dispatcher.dispatch_postprocess(rows, row_probs)
    output = dispatcher.combine_preprocess(experts(tokens, counts, token_probs))
    return dispatcher.combine_postprocess(dispatcher.token_combine(output))


def step(dispatcher, experts: Callable, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Forward and backward; output and the gradients of hidden states, probabilities and router."""
    hidden = inputs.hidden.detach().requires_grad_()
    router = inputs.router.detach().requires_grad_()
    probs = probabilities(hidden.view(len(hidden), -1), router, inputs.routing_map)
    probs.retain_grad()
    output = forward(dispatcher, experts, hidden, probs, inputs.routing_map)
    output.backward(inputs.grad)
    selected_grad = torch.where(inputs.routing_map, probs.grad, 0)
    return {
        "output": output.detach(),
        "hidden gradient": hidden.grad,
        "probability gradient": selected_grad,
        "router gradient": router.grad,
    }


def exact_step(scale_by_slot: torch.Tensor, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The same in fp32 without dispatch: with scale experts the output is hidden x (probabilities @ scales)."""
    hidden = inputs.hidden.detach().float().requires_grad_()
    router = inputs.router.detach().float().requires_grad_()
    flat = hidden.view(len(hidden), -1)
    probs = probabilities(flat, router, inputs.routing_map)
    probs.retain_grad()
    output = flat * (probs @ scale_by_slot.float())
    output.backward(inputs.grad.float().view(output.shape))
    return {
        "output": output.detach().view(hidden.shape),
        "hidden gradient": hidden.grad,
        "probability gradient": torch.where(inputs.routing_map, probs.grad, 0),
        "router gradient": router.grad,
    }


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """L2 distance over the norm of `exact`, in fp64; infinite for NaN, which a maximum over ranks may lose."""
    exact = exact.double()
    error = float((found.double() - exact).norm() / exact.norm())
    return math.inf if math.isnan(error) else error
