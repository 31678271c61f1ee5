"""The Triton kernels on CPU, in the interpreter: same bytes as the plain-torch twins, and damage noticed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ciera.param_gather.codec import CODECS

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run_worker(*arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    worker = [sys.executable, str(HERE / "codec_kernel_worker.py"), *arguments]
    finished = subprocess.run(worker, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize("dtype", ("bf16", pytest.param("fp16", marks=pytest.mark.slow), "fp32"))
@pytest.mark.parametrize("name", CODECS)
def test_kernels_write_the_bytes_of_their_twins(name, dtype):
    run_worker(name, dtype)


@pytest.mark.parametrize("name", CODECS)
def test_kernels_notice_damage(name):
    run_worker(name, "damage")
