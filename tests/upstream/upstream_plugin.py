"""A pytest plugin under which Megatron-LM's own unit tests run with or without this extension, and without a GPU.

Loaded with `-p upstream_plugin` by run.py, in a checkout of Megatron-LM, before anything of Megatron is imported.
On GPUs the tests have NCCL, and ranks share a GPU where there are fewer of them. CIERA_UPSTREAM_MODE says how much
of the extension is there:

absent    nothing; without a GPU the CPU layer alone, without which nothing of these tests runs on such a machine
inactive  the launcher's seams as well, no flag given
active    every MoE layer gets the deduplicating dispatcher and a placement in reverse order, every expert module is
          saved under it, every distributed optimizer gathers its parameters compressed
"""

import functools
import json
import os
import re
import sys
import types
import unittest.mock
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from selection import LEFT_OUT_ON_CPU, LEFT_OUT_ON_GPU, NOT_WHEN_ACTIVE

from megatron_ciera import cpu

MODE = os.environ["CIERA_UPSTREAM_MODE"]
RESULTS = Path(os.environ["CIERA_UPSTREAM_RESULTS"])
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
# A rank that fails leaves the others in a collective: they must get out of it.
TIMEOUT = timedelta(seconds=60)
# Marks that ask for a GPU where the CPU layer will do; those for kernels of GPUs stay.
_ANY_GPU = re.compile(
    r"^(CUDA not available|CUDA is not available|Requires CUDA|CUDA required)", re.IGNORECASE
)

ON_GPU = not cpu.is_needed()

if ON_GPU:
    import torch

    # As tests/shared_gpu does it, but ranks keep their local number, which the tests take for their rank.
    if torch.cuda.device_count() < WORLD_SIZE:
        os.environ.update(NCCL_HOSTID=f"host{RANK}", NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")
    # A rank that fails closes its connections. The others give up what they wait for and live on (CleanUpOnly).
    os.environ.update(TORCH_NCCL_ASYNC_ERROR_HANDLING="2")
else:
    cpu.install()


def _backend(asked: str | None) -> str | None:
    """gloo stands in for NCCL where there is no GPU."""
    return "gloo" if not ON_GPU and asked in (None, "nccl") else asked


def _in_a_world_of_its_own(init):
    def init_process_group(backend=None, *args, **kwargs):
        kwargs["timeout"] = TIMEOUT
        if "store" in kwargs:  # addresses of an earlier world are in it
            kwargs["store"] = dist.PrefixStore(f"before_test_{_finished}", kwargs["store"])
        return init(_backend(backend), *args, **kwargs)

    return init_process_group


def _without_device_ids(barrier):
    def on_gloo(group=None, async_op=False, device_ids=None):
        return barrier(group=group, async_op=async_op)

    return on_gloo


_megatrons_groups = {}
_other_groups = []


def _one_for_each_set_of_ranks(make):
    """Megatron's tests make its some forty groups anew in each test and never end them.

    Each gloo group is three threads, one of which wakes up a hundred times a second: after twenty tests nothing
    else runs any more. NCCL connects each group anew at its first collective.
    """

    def new_group(ranks=None, timeout=None, backend=None, pg_options=None, *args, **kwargs):
        ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        backend = _backend(backend)
        if kwargs.get("group_desc") is None:
            _other_groups.append(make(ranks, TIMEOUT, backend, None, *args, **kwargs))
            return _other_groups[-1]
        key = tuple(ranks), backend
        if key not in _megatrons_groups:
            _megatrons_groups[key] = make(ranks, TIMEOUT, backend, None, *args, **kwargs)
        return _megatrons_groups[key]

    return new_group


def _forgetting_groups(destroy):
    def destroy_process_group(group=None):
        if group is None:
            _megatrons_groups.clear()
            _other_groups.clear()
        elif group in _megatrons_groups.values():
            return None
        return destroy(group)

    return destroy_process_group


def _end_other_groups() -> None:
    for group in _other_groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    _other_groups.clear()


def _no_download(*args, **kwargs):
    raise RuntimeError("test data is not downloaded here")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config):
    """Before Megatron's own conftest.py, which imports it."""
    sys.path.insert(0, str(early_config.rootpath))
    dist.init_process_group = _in_a_world_of_its_own(dist.init_process_group)
    if not ON_GPU:
        dist.barrier = _without_device_ids(dist.barrier)
    dist.destroy_process_group = _forgetting_groups(dist.destroy_process_group)
    dist.new_group = _one_for_each_set_of_ranks(dist.new_group)
    from megatron_ciera import compat, install

    if MODE != "absent":
        install.install()
    if not ON_GPU or MODE != "absent":
        compat.install()
    if not ON_GPU:
        cpu.install_megatron_patches()
    if MODE == "active":
        import upstream_active

        upstream_active.attach()
    sys.modules.setdefault("mock", unittest.mock)  # what the package of that name was before Python had it
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].download_and_extract_asset = _no_download


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # Beside each other: Megatron's tests find the folder that their ranks share two levels above.
    config.option.basetemp = str(RESULTS / f"tmp_rank{RANK}")


def pytest_collection_modifyitems(items):
    left_out = (LEFT_OUT_ON_GPU if ON_GPU else LEFT_OUT_ON_CPU) | (
        NOT_WHEN_ACTIVE if MODE == "active" else {}
    )
    items[:] = [item for item in items if not any(name in item.nodeid for name in left_out)]
    if ON_GPU:
        return
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if not _asks_for_any_gpu(mark)]


def _asks_for_any_gpu(mark) -> bool:
    return mark.name == "skipif" and bool(_ANY_GPU.match(mark.kwargs.get("reason", "")))


_finished = 0
_failed = False


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.parent is not item.parent:
        _end_other_groups()


def pytest_runtest_logreport(report):
    """One line a phase that decides: failed or skipped in any, else the call's."""
    global _failed
    if report.when != "call" and report.passed:
        return
    reason = ""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = crash.message if crash else str(report.longrepr)
        _failed = True
        _end_world()
    _write(
        {
            "test": report.nodeid,
            "outcome": report.outcome,
            "reason": reason[:600],
            "s": round(report.duration, 2),
        }
    )


def pytest_runtest_logfinish():
    """Ranks start the next test together, and in a new world if one of them left the old one in the middle."""
    global _finished, _failed
    if MODE == "active":
        import upstream_active

        _write({"counts": upstream_active.counts()})
    store = _agreement()
    store.set(f"{_finished}/{RANK}", "failed" if _failed else "well")
    keys = [f"{_finished}/{rank}" for rank in range(WORLD_SIZE)]
    store.wait(keys, 2 * TIMEOUT)
    any_failed = b"failed" in [store.get(key) for key in keys]
    _finished, _failed = _finished + 1, False
    if any_failed:
        _end_world()


@functools.cache
def _agreement():
    """A store beside the one that tests use: torchrun's own, whose server outlives every world."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore("ciera_upstream", store)


def _end_world() -> None:
    """Closes this rank's connections, so that ranks that wait for it get an error at once."""
    if dist.is_initialized():
        dist.destroy_process_group()


def pytest_collectreport(report):
    if report.failed:
        _write({"test": report.nodeid, "outcome": "failed", "reason": str(report.longrepr)[-600:], "s": 0})
    elif report.skipped:
        _write({"test": report.nodeid, "outcome": "skipped", "reason": str(report.longrepr[2]), "s": 0})


def _write(line: dict) -> None:
    with open(RESULTS / f"rank{RANK}.jsonl", "a") as file:
        print(json.dumps(line), file=file)
