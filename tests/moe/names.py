"""Layers of Transformer Engine beside Megatron's local ones: what the workers build, and how parameters are named."""

import os
import re

VARIABLE = "CIERA_TEST_LAYERS"
TRANSFORMER_ENGINE = os.environ.get(VARIABLE) == "transformer_engine"

_LOCAL = (
    (r"self_attention\.linear_qkv\.layer_norm_weight$", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight$", "pre_mlp_layernorm.weight"),
    (r"experts\.(linear_fc\d)\.weight(\d+)$", r"experts.local_experts.\2.\1.weight"),
)


def as_local(name: str) -> str:
    """A parameter's name as the model of local layers has it; local names stay as they are."""
    for pattern, replacement in _LOCAL:
        name = re.sub(pattern, replacement, name)
    return name


def parameters_as_local(model) -> dict:
    """All parameters of a model by local name."""
    return {as_local(name): parameter for name, parameter in model.named_parameters()}


def expert_weights(layer) -> dict[str, list]:
    """{"fc1", "fc2"} -> the weights of this rank's experts, by slot, of SequentialMLP or TEGroupedMLP."""
    found, slots = parameters_as_local(layer), range(layer.num_local_experts)
    return {
        short: [found[f"experts.local_experts.{slot}.linear_{short}.weight"] for slot in slots]
        for short in ("fc1", "fc2")
    }
