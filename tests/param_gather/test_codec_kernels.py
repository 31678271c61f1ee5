"""The Triton kernels on CPU, in the interpreter: same bytes as the plain-torch twins, and damage noticed."""

import pytest

from megatron_ciera.param_gather.codec import CODECS
from tests.param_gather.interpreted import run_selected


@pytest.fixture(scope="module")
def outcomes(request):
    return run_selected(request, "codec_kernel_worker.py")


@pytest.mark.parametrize("case", ("bf16", pytest.param("fp16", marks=pytest.mark.slow), "fp32"))
@pytest.mark.parametrize("name", CODECS)
def test_kernels_write_the_bytes_of_their_twins(outcomes, name, case):
    assert outcomes[name, case] == ""


@pytest.mark.parametrize("case", ("damage",))
@pytest.mark.parametrize("name", CODECS)
def test_kernels_notice_damage(outcomes, name, case):
    assert outcomes[name, case] == ""
