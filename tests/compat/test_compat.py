"""What the wheel lacks on CPU and GPU alike: sequence parallelism with torch's norms, and the Makefile."""

import pytest
import torch

from megatron_ciera import compat
from megatron_ciera.compat import dataset_helpers
from megatron_ciera.errors import ConfigurationError


@pytest.fixture(autouse=True)
def installed():
    compat.install()
    compat.install()


def config(sequence_parallel, normalization="RMSNorm"):
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        normalization=normalization,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
    )


@pytest.mark.parametrize("normalization, num_weights", [("RMSNorm", 1), ("LayerNorm", 2)])
def test_norm_of_a_sequence_slice_is_marked_for_the_all_reduce(normalization, num_weights):
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    settings = config(True, normalization)
    norm = WrappedTorchNorm(settings, 16, eps=1e-6)
    weights = list(norm.parameters())
    assert type(norm).__name__ == normalization and norm.eps == 1e-6
    assert len(weights) == num_weights
    assert all(weight.sequence_parallel is True for weight in weights)
    assert settings.sequence_parallel is True


def test_norm_without_sequence_parallelism_is_megatrons_own():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norm = WrappedTorchNorm(config=config(False), hidden_size=16)
    assert not any(hasattr(weight, "sequence_parallel") for weight in norm.parameters())


def test_other_refusals_of_the_norm_stay():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    settings = config(True)
    settings.layernorm_zero_centered_gamma = True
    with pytest.raises(AssertionError, match="zero_centered_gamma"):
        WrappedTorchNorm(settings, 16)


def test_sequence_slices_give_the_rows_of_the_whole():
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    rows = torch.randn(8, 2, 16)
    norm = WrappedTorchNorm(config(True), 16)
    assert torch.equal(torch.cat([norm(rows[:4]), norm(rows[4:])]), norm(rows))


def test_compiled_helpers_of_the_wheel_are_accepted():
    from megatron.core.datasets.utils import compile_helpers

    compile_helpers()


def test_a_makefile_is_made_where_nothing_is_compiled(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(dataset_helpers, "_MODULE", "megatron.core.datasets.not_compiled")
    (tmp_path / "Makefile").write_text("")
    dataset_helpers._compile_or_find(lambda: made.append(True), tmp_path)()
    assert made == [True]


def test_module_of_the_wheel_spares_the_makefile(tmp_path):
    (tmp_path / "Makefile").write_text("")
    dataset_helpers._compile_or_find(lambda: pytest.fail("must not be made"), tmp_path)()


def test_only_the_same_source_counts(tmp_path):
    wheel = dataset_helpers._folder_of_wheel()
    source = (wheel / "helpers.cpp").read_bytes()
    assert not dataset_helpers._is_same_source(tmp_path, wheel)
    (tmp_path / "helpers.cpp").write_bytes(source)
    assert dataset_helpers._is_same_source(tmp_path, wheel)
    (tmp_path / "helpers.cpp").write_bytes(source[:-1] + b" ")
    assert not dataset_helpers._is_same_source(tmp_path, wheel)


def test_neither_module_nor_makefile_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_helpers, "_MODULE", "megatron.core.datasets.not_compiled")
    with pytest.raises(
        ConfigurationError, match="neither a helpers_cpp compiled for this Python nor a Makefile"
    ):
        dataset_helpers._compile_or_find(lambda: None, tmp_path)()


def test_a_changed_host_is_refused(monkeypatch):
    from megatron.core.datasets import utils

    monkeypatch.delattr(utils, "compile_helpers")
    with pytest.raises(ConfigurationError, match="compile_helpers"):
        dataset_helpers.install()
