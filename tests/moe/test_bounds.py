"""With clipping, from equal states: no tensor is further from fp32 than twice plain bf16's. See bounds_worker.py.

The gradient norm adds experts in slot order, so that its last bit, and through clipping every value, may differ.
"""

import json
from pathlib import Path

import pytest

from tests.launching import launch

WORKER = Path(__file__).with_name("bounds_worker.py")
CLIP = 0.5


@pytest.mark.slow
@pytest.mark.parametrize("expert_parallel", [2, 4])
def test_errors_against_fp32(tmp_path, expert_parallel):
    iterations = (0, 50, 100)
    launch(tmp_path, 4, [tmp_path, expert_parallel, *iterations], script=(str(WORKER),), timeout=900).check()
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == [str(iteration) for iteration in iterations]
    for iteration, found in results.items():
        assert min(norm for norms in found["norms"].values() for norm in norms) > CLIP
        # Placement in front of the stock dispatcher changes the order of the norm's sum and nothing else.
        assert found["losses"]["placed"] == found["losses"]["plain"]
        plain = found["errors"]["plain"]
        assert len(plain) == 51
        for variant in ("placed", "deduplicated", "placed and deduplicated"):
            for tensor, error in found["errors"][variant].items():
                if iteration == "0" and variant != "placed" and tensor.endswith("master"):
                    # Adam's first step is the learning rate times the gradient's sign: an error is a flipped sign.
                    continue
                assert error <= 2 * plain[tensor], (iteration, variant, tensor)
