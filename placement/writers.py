"""Writes a placement in the form that serving engines read, so that a model is served as it was trained."""

import json

from placement.file import DECODER, Placement, write_atomically

FORMATS = ("megatron-ciera", "sglang", "tensorrt-llm")


def write_placement(path, placement: Placement, format_name: str) -> None:
    """Writes `placement` as one of `FORMATS`, whole or not at all. Raises ValueError for another format."""
    if format_name == "megatron-ciera":
        placement.save(path)
    elif format_name == "sglang":
        write_atomically(path, sglang_text(placement))
    elif format_name == "tensorrt-llm":
        write_atomically(path, tensorrt_llm_text(placement))
    else:
        raise ValueError(f"--format {format_name}: wanted one of {', '.join(FORMATS)}")


def sglang_text(placement: Placement) -> str:
    """JSON for SGLang's `--init-expert-location`: {"physical_to_logical_map": [layers][slots]}.

    SGLang indexes the list by decoder layer; layers without experts are given the identity. A placement in
    MoE order is written as it is, layer i being the i-th row.
    """
    identity = list(range(placement.num_experts))
    decoder = {
        layer.layer_id.layer: layer.physical_to_logical_map.tolist()
        for layer in placement.layers
        if layer.layer_id.block == DECODER
    }
    rows = [decoder.get(layer, identity) for layer in range(max(decoder) + 1)]
    return json.dumps({"physical_to_logical_map": rows}) + "\n"


def tensorrt_llm_text(placement: Placement) -> str:
    """YAML for TensorRT-LLM's expert load balancer: one slot an expert, no online updates."""
    lines = ["initial_global_assignments:"]
    for layer in placement.layers:
        if layer.layer_id.block == DECODER:
            slots = ", ".join(map(str, layer.physical_to_logical_map.tolist()))
            lines.append(f"  {layer.layer_id.layer}: [{slots}]")
    lines += [f"num_slots: {placement.num_experts}", "layer_updates_per_iter: 0"]
    return "\n".join(lines) + "\n"
