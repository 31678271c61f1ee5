"""One process with the layer in place: devices, streams, generators and 16-bit products."""

import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_ciera import cpu
from megatron_ciera.cpu import matmul
from megatron_ciera.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not cpu.is_needed(), reason="the CPU layer is for machines without a GPU")


@pytest.mark.parametrize("device", ["cuda", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1), None])
def test_every_spelling_of_a_cuda_device_is_the_cpu(device):
    assert torch.ones(3, device=device).device.type == "cpu"


def test_moving_to_a_cuda_device_keeps_the_tensor():
    tensor = torch.ones(3)
    module = torch.nn.Linear(2, 2)
    assert (
        tensor.cuda() is tensor
        and tensor.to("cuda") is tensor
        and tensor.to(torch.device("cuda", 0)) is tensor
    )
    assert module.cuda() is module and next(module.to("cuda").parameters()).device.type == "cpu"
    assert torch.ones(3, device=torch.cuda.current_device()).device.type == "cpu"


def test_no_gpu_is_claimed_and_one_device_is_counted():
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.memory_allocated() == 0
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0


@pytest.mark.parametrize(
    "dtype, name",
    [(torch.bfloat16, "BFloat16Tensor"), (torch.float16, "HalfTensor"), (torch.float32, "FloatTensor")],
)
def test_type_names_are_those_of_cuda_tensors(dtype, name):
    tensor = torch.ones(2, dtype=dtype)
    assert tensor.type() == f"torch.cuda.{name}"
    assert tensor.type(torch.float64).dtype == torch.float64
    assert torch.ones(2).type(tensor.type()).dtype == dtype


def test_streams_and_events_are_done_at_once():
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    with torch.cuda.stream(stream):
        start.record()
    end.record(torch.cuda.current_stream())
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(end)
    assert end.query() and start.elapsed_time(end) >= 0
    assert not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(torch.cuda.Event())


def test_compile_leaves_functions_alone():
    def double(x):
        return 2 * x

    assert torch.compile(double) is double
    assert torch.compile(mode="max-autotune")(double) is double


def test_generator_states_round_trip():
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first)
    assert torch.cuda.default_generators[torch.cuda.current_device()] is torch.default_generator


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_does_not_move_the_generator(num_workers):
    loader = torch.utils.data.DataLoader(range(4), num_workers=num_workers)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert [int(sample) for sample in loader] == [0, 1, 2, 3]
    assert torch.equal(torch.get_rng_state(), state)


def forked(tracker_seed):
    from megatron.core.tensor_parallel import random

    tracker = random.CudaRNGStatesTracker()
    tracker.add("some", tracker_seed)
    with tracker.fork("some"):
        return torch.rand(3), tracker


def test_megatrons_tracker_draws_by_name_and_restores():
    torch.manual_seed(9)
    before = torch.get_rng_state()
    first, tracker = forked(17)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(forked(17)[0], first)
    with tracker.fork("some"):
        assert not torch.equal(torch.rand(3), first)


PRODUCTS = {
    "mm": lambda a, b, c: torch.mm(a[0], b[0]),
    "mm, right transposed": lambda a, b, c: torch.mm(a[0], b[0].t().contiguous().t()),
    "bmm": lambda a, b, c: torch.bmm(a, b),
    "addmm": lambda a, b, c: torch.addmm(c[0, 0], a[0], b[0]),
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0),
    "baddbmm, NaN not read": lambda a, b, c: torch.baddbmm(torch.full_like(c, torch.nan), a, b, beta=0.0),
    "empty": lambda a, b, c: torch.mm(a[0, :0], b[0]),
    "inner dimension empty": lambda a, b, c: torch.mm(a[0, :, :0], b[0, :0]),
    "matmul": lambda a, b, c: a.matmul(b[0]),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_are_fp32_products_rounded_once(name, dtype):
    if dtype not in matmul.slow_dtypes():
        pytest.skip(f"this CPU multiplies {dtype} itself")
    generator = torch.Generator().manual_seed(2)
    sizes = [(3, 5, 16), (3, 16, 7), (3, 5, 7)]
    operands = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    product = PRODUCTS[name](*operands)
    expected = PRODUCTS[name](*(operand.float() for operand in operands)).to(dtype)
    assert product.dtype == dtype
    assert torch.equal(product.view(torch.int16), expected.view(torch.int16))


def test_gradients_flow_through_16_bit_products():
    a = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(8, 6, dtype=torch.bfloat16, requires_grad=True)
    (a @ b).backward(torch.ones(4, 6, dtype=torch.bfloat16))
    ones = torch.ones(4, 6)
    assert torch.equal(a.grad, (ones @ b.detach().float().t()).bfloat16())
    assert torch.equal(b.grad, (a.detach().float().t() @ ones).bfloat16())


def test_install_is_idempotent():
    compile_function = torch.compile
    cpu.install()
    assert torch.compile is compile_function


def test_install_after_megatron_is_refused():
    program = "import megatron.core\nfrom megatron_ciera import cpu\ncpu.install()"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode != 0
    assert "megatron.core: found imported before the CPU layer, needs to come after it" in run.stderr


def test_importing_the_package_changes_nothing():
    program = (
        "import torch\nbefore = dict(vars(torch.cuda)), torch.Tensor.cuda, torch.compile\n"
        "from megatron_ciera import compat, cpu\n"
        "assert (dict(vars(torch.cuda)), torch.Tensor.cuda, torch.compile) == before\n"
        "import sys\nassert 'megatron.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_device_variable(monkeypatch):
    from megatron_ciera.cpu import layer

    monkeypatch.setattr(layer, "_is_installed", False)
    monkeypatch.setenv("MEGATRON_CIERA_DEVICE", "cuda")
    assert not cpu.is_needed()
    monkeypatch.setenv("MEGATRON_CIERA_DEVICE", "cpu")
    assert cpu.is_needed()
    monkeypatch.setenv("MEGATRON_CIERA_DEVICE", "tpu")
    with pytest.raises(ConfigurationError, match="MEGATRON_CIERA_DEVICE: found tpu, needs cpu or cuda"):
        cpu.is_needed()


def test_an_attribute_that_is_gone_is_named():
    from megatron_ciera.cpu.replace import replace

    host = types.ModuleType("some.host")
    with pytest.raises(ConfigurationError, match="some.host.step: found nothing of that name"):
        replace(host, "step", None)
