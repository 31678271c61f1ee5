"""`python -m placement.study`: formation of coupling over steps and over the number of fit tokens."""

import json

import numpy as np
import pytest

from placement.study import main, study
from placement.synthetic import synthetic_routing

TOKENS = 33_280


def test_stationary_coupling_is_found_from_few_tokens_and_plotted(tmp_path, capsys):
    routing = synthetic_routing(3, TOKENS, 2)
    early = synthetic_routing(3, 4096, 2, seed=1)
    np.savez(tmp_path / "trace.npz", step10=early, step20=routing)
    assert main([str(tmp_path / "trace.npz"), "--plot", str(tmp_path / "study.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["by_step"]) == ["10", "20"]
    assert list(found["by_fit_tokens"]) == ["1024", "2048", "4096", "8192", "16384", "32768"]
    contiguous, last = found["rows_removed_contiguous"], found["by_step"]["20"]
    assert last["rows_removed"] > contiguous + 0.15
    assert last["pearson"] > 0.9
    # The early array couples other experts, so it teaches nothing of the last one.
    assert found["by_step"]["10"]["rows_removed"] < last["rows_removed"] - 0.1
    assert (tmp_path / "study.png").stat().st_size > 10_000


@pytest.mark.parametrize("arrays", [{}, {1: np.zeros((2, 32_768, 2), np.uint8)}], ids=["none", "too few"])
def test_too_few_tokens_are_refused(arrays):
    with pytest.raises(ValueError, match="tokens in the last array stepN, wanted more than 32768"):
        study(arrays, 8)


def test_the_command_line_names_the_file(tmp_path, capsys):
    np.savez(tmp_path / "short.npz", step1=np.zeros((2, 64, 2), np.uint8))
    assert main([str(tmp_path / "short.npz"), "--plot", str(tmp_path / "study.png")]) == 2
    assert "short.npz" in capsys.readouterr().err
    assert not (tmp_path / "study.png").exists()
