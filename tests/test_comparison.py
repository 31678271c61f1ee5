"""Comparing observed runs: equal is equal to the bit, and every kind of difference is found and named."""

import json
import sys

import pytest

from megatron_ciera.comparison import compare, observe_run


def run(folder, losses=(1.0, 0.5), norms=(2.0, 1.5), digests=("aa", "bb"), first=1):
    """A folder as MEGATRON_CIERA_OBSERVE leaves it, of two ranks."""
    folder.mkdir()
    records = [
        {"iteration": first + i, "losses": {"lm loss": loss}, "grad_norm": norm, "metrics": {}}
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True))
    ]
    (folder / "iterations.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for rank, digest in enumerate(digests):
        (folder / f"parameters_rank{rank}.json").write_text(json.dumps({"0.weight": digest}))
    return folder


def test_equal_runs(tmp_path):
    found = compare(run(tmp_path / "a"), run(tmp_path / "b"))
    assert found.equal and found.bitwise_identical
    assert (found.iterations, found.parameters, found.loss_max_abs_diff) == (2, 2, 0.0)


@pytest.mark.parametrize(
    "change, text",
    [
        ({"losses": (1.0, 0.5000001)}, "iteration 2, lm loss: 0.5 and 0.5000001"),
        ({"losses": (1.0, float("nan"))}, "iteration 2, lm loss: 0.5 and nan"),
        ({"norms": (2.0, 1.25)}, "iteration 2, gradient norm: 1.5 and 1.25"),
        ({"digests": ("aa", "bc")}, "final parameters: rank1, 0.weight"),
        ({"digests": ("aa",)}, "final parameters: digests of 2 and 1 ranks"),
    ],
)
def test_differences_are_named(tmp_path, change, text):
    found = compare(run(tmp_path / "a"), run(tmp_path / "b", **change))
    assert not found.equal and found.first_difference == text


def test_nan_in_both_is_equal(tmp_path):
    nan = {"losses": (1.0, float("nan"))}
    assert compare(run(tmp_path / "a", **nan), run(tmp_path / "b", **nan)).equal


def test_runs_that_cover_other_iterations_are_not_compared(tmp_path):
    with pytest.raises(ValueError, match="must cover the same, with --log-interval 1"):
        compare(run(tmp_path / "a"), run(tmp_path / "b", first=3))


def test_run_that_was_not_observed_is_named(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="b/iterations.jsonl: not found, .* launched through megatron_ciera"):
        compare(run(tmp_path / "a"), tmp_path / "b")


def test_what_an_earlier_run_observed_is_not_taken_for_this_one(tmp_path):
    folder = run(tmp_path / "a")
    assert observe_run([sys.executable, "-c", ""], folder, tmp_path / "log") == 0
    assert list(folder.iterdir()) == []
