"""A small trace written by hand, and the cluster it is played on."""

import json

from megatron_ciera.cluster import Cluster, Link

SETTINGS = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 2,
}
# 256 bytes/s between nodes, 1,024 inside.
CLUSTER = Cluster("CPU", 2, 2, 1.0, Link(1024e-9, 0.0), Link(256e-9, 0.0))


def span(kind, name, thread, begin, end, **args):
    event = {"ph": "X", "pid": 0, "tid": thread, "cat": kind, "name": name, "ts": 1e6 * begin}
    return event | {"dur": 1e6 * (end - begin), "args": {"iteration": 1, **args}}


def collective(name, call, begin, end, role, size, num_bytes):
    details = {"group": role, "size": size, "per_node": size, "bytes": num_bytes, "issued_by": "compute"}
    return span("collective", name, 2, begin, end, call=call, **details)


def wait(call, begin, end):
    return span("wait", "wait", 1, begin, end, call=call)


def compute(begin, end):
    return span("compute", "compute", 1, begin, end)


def write(folder, features=(), world=4, closed=True, **settings):
    """Iteration 1: 1 s of work, an all-to-all, 2 s of work beside a reduction, and a gather."""
    header = {"format": "megatron-ciera-trace", "version": 1, "clock": "host", "world": world}
    header |= {"ranks_per_node": 4, "features": list(features), "settings": SETTINGS | settings}
    events = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0", **header}},
        {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "compute"}},
        span("iteration", "iteration", 0, 0, 6),
        compute(0, 1),
        collective("all_to_all", 0, 1.0, 1.5, "expert", 2, 1024),
        wait(0, 1.0, 1.625),
        compute(1.625, 2.0),
        collective("reduce_scatter", 1, 2.0, 3.0, "data", 4, 512),
        compute(2.0, 4.0),
        wait(1, 4.0, 4.0),
        collective("all_gather", 2, 4.0, 5.75, "expert data", 2, 512),
        wait(2, 4.0, 5.75),
        compute(5.75, 6.0),
    ]
    text = "[\n" + ",\n".join(json.dumps(event) for event in events)
    (folder / "trace_rank0.json").write_text(text + ("\n]\n" if closed else ",\n"))
    return str(folder)
