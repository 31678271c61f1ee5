"""The passes around nvCOMP, in the interpreter; and what is said when nvCOMP is not there."""

import ctypes
import subprocess

import pytest
import torch

from megatron_ciera.param_gather.codec import CODECS
from megatron_ciera.param_gather.codec.ans_format import AnsShape, chunk_values, num_chunks
from megatron_ciera.param_gather.codec.nvcomp_library import (
    CompressOptions,
    DecompressOptions,
    find_library,
    open_library,
    package_name,
)
from tests.param_gather.interpreted import run_selected


@pytest.fixture(scope="module")
def outcomes(request):
    return run_selected(request, "codec_ans_worker.py")


@pytest.mark.parametrize("case", ("bf16", "fp16", "fp32", "damage", "segments"))
@pytest.mark.parametrize("name", CODECS)
def test_passes_around_the_coder(outcomes, name, case):
    assert outcomes[name, case] == ""


def test_options_have_the_size_of_the_c_structs():
    assert ctypes.sizeof(CompressOptions) == ctypes.sizeof(DecompressOptions) == 64


def test_a_missing_package_is_named_with_the_way_out():
    with pytest.raises(ValueError, match=r'pip install "no-such-nvcomp>=6,<7", or use --ciera-coder packed'):
        find_library("no-such-nvcomp")
    with pytest.raises(ValueError, match="has no such file; wanted libnvcomp.so.6"):
        find_library("numpy")
    assert package_name("12.8") == "nvidia-libnvcomp-cu12"
    assert package_name("13.0") == "nvidia-libnvcomp-cu13"


def test_another_library_or_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nvCOMP does not load"):
        open_library(str(tmp_path / "libnvcomp.so.6"))
    source = tmp_path / "old.c"
    source.write_text("int nvcompGetProperties(unsigned *p) { p[0] = 5100; p[1] = 0; return 0; }\n")
    library = tmp_path / "old.so"
    compiler = subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], capture_output=True)
    assert compiler.returncode == 0, compiler.stderr
    with pytest.raises(ValueError, match="is nvCOMP version 5100, status 0, wanted major 6"):
        open_library(str(library))


@pytest.mark.parametrize("count", (0, 1, 4096, 65_536, 65_537, (1 << 25) - 1, 1 << 25, 500_000_000))
def test_bounds(count):
    assert (
        (num_chunks(count) - 1) * chunk_values(count)
        < max(count, 1)
        <= max(num_chunks(count) * chunk_values(count), 1)
    )
    delta = AnsShape(0, 0, True)
    assert delta.bound(count) % 16 == 0
    if count >= 65_536:
        assert delta.bound(count) <= 1.005 * 2 * count
    assert torch.iinfo(torch.int32).max > chunk_values(count)
