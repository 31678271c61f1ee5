"""Triton kernels against their torch twins: in the interpreter here, compiled where there is a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("kernel_worker.py")


def run(*words):
    pytest.importorskip("triton", reason="needs Triton")
    return subprocess.run([sys.executable, WORKER, *words], capture_output=True, text=True, timeout=900)


def test_kernels_in_the_interpreter():
    process = run()
    assert process.returncode == 0 and process.stdout.strip() == "equal", process.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_the_gpu():
    process = run("--gpu")
    assert process.returncode == 0 and process.stdout.strip() == "equal", process.stderr[-3000:]
