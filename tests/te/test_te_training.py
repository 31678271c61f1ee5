"""Training with Transformer Engine, on two GPUs or two ranks that share one: every promise about bits.

With top-2 every sum of the dispatch has two terms, so that runs are compared bit for bit; `--clip-grad 0` where
experts are in other places, as a gradient norm sums them in slot order.
"""

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megatron_ciera import observe
from megatron_ciera.comparison import compare
from tests.moe.placed_runs import by_expert, checkpoint, same_checkpoint, write_placement
from tests.shuffle.shuffle_files import write_placement as write_shuffled
from tests.te.te_runs import MARKS, PRECISIONS, STARTS, Runs

pytestmark = MARKS
BF16_STEP = 2.0**-8

# Run with features -> stock run with the same bits.
SAME = {
    **{f"{name}, replicated, ciera": f"{name}, replicated" for name in PRECISIONS},
    **{f"{name}, experts, all": f"{name}, experts" for name in PRECISIONS},
    "masters, replicated, overlap": "masters, replicated",
    "precise, replicated, overlap": "precise, replicated",
    "masters, alone, ciera": "masters, alone",
    "fp8 parameters, ciera": "fp8 parameters",
    "delayed, experts, all": "delayed, experts",
    "graphs, all": "graphs",
    "dedup, recomputed layers": "masters, experts",
    "dedup, recomputed activations": "masters, experts",
    "top 4, dedup again": "top 4, dedup",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("te")


@pytest.fixture(scope="module")
def maps(folder):
    return {name: write_placement(folder / f"{name}.json", 2, seed) for name, seed in (("a", 0), ("b", 1))}


@pytest.fixture(scope="module")
def runs(folder, maps):
    write_shuffled(folder / "shuffled.json", 5, 2)
    return Runs(folder)


@pytest.mark.parametrize("name", SAME)
def test_bits_of_stock(runs, name):
    """Losses, gradient norms and every parameter of every rank, over all iterations."""
    stock, ours = runs[SAME[name]], runs[name]
    found = compare(stock.observed, ours.observed)
    assert found.equal, found.first_difference
    assert found.iterations == STARTS[name].iterations


@pytest.mark.parametrize("name", [name for name in SAME if "--ciera" in STARTS[name].flags])
def test_gathers_are_coded(runs, name):
    records = runs[name].iterations

    def total(metric):
        return sum(observe.metric(record, f"ciera/{metric}") for record in records)

    if STARTS[name].processes == 1:
        assert total("bytes_raw") == 0
    elif name.startswith("fp8 parameters"):
        assert total("raw_fallbacks/unsupported") > 0
    else:
        assert total("coded_gathers") > 0 and total("bytes_sent") < total("bytes_raw")
        assert total("raw_fallbacks") == 0


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_placed_run_has_the_bits_of_the_contiguous_one(runs, maps, name):
    """Deduplicated, from a contiguous checkpoint of plain Megatron saved by slot."""
    plain, ours = runs[f"{name}, plain"], runs[f"{name}, under a"]
    assert by_expert(ours, 2, maps["a"]) == by_expert(plain, 2)
    assert sum(len(key) == 3 for key in by_expert(plain, 2)) == 2 * 8 * 2
    for stock, found in zip(plain.iterations[1:], ours.iterations, strict=True):
        assert found["losses"] == stock["losses"]
        assert found["metrics"]["moe/rows_sent"] < found["metrics"]["moe/rows_stock"]


@pytest.mark.parametrize("name", PRECISIONS)
def test_another_placement_continues_with_the_same_bits(runs, folder, maps, name):
    """Stock dispatcher; the checkpoint of placement A was moved to B with weights, masters and moments."""
    run, plain = runs[f"{name}, under b"], runs[f"{name}, plain"]
    assert by_expert(run, 2, maps["b"]) == by_expert(plain, 2)
    same_checkpoint(checkpoint(folder / f"{name}_under_a", 3), checkpoint(folder / f"{name}_under_b", 3))


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_resumed_run_is_the_one_that_went_on(runs, folder, name):
    run, through = runs[f"{name}, resumed"], runs[f"{name}, under a"]
    assert run.parameters == through.parameters
    assert run.iterations[-1]["losses"] == through.iterations[-1]["losses"]
    same_checkpoint(checkpoint(folder / f"{name}_under_a", 3), checkpoint(folder / f"{name}_again", 3))


@pytest.mark.parametrize("name", PRECISIONS)
def test_plain_megatron_reads_a_placed_checkpoint(runs, folder, name):
    """The same loss from the same weights; with whole masters the same bits behind the next step too."""
    run, plain = runs[f"{name}, in plain"], runs[f"{name}, plain"]
    assert run.iterations[-1]["losses"] == plain.iterations[-1]["losses"]
    if name != "precise":  # Megatron does not load that optimizer's state from checkpoints by expert
        assert by_expert(run, 2) == by_expert(plain, 2)
        same_checkpoint(checkpoint(folder / f"{name}_under_a", 3), checkpoint(folder / f"{name}_in_plain", 3))


@pytest.mark.parametrize("name", PRECISIONS)
def test_extra_states_are_those_of_plain_megatron(runs, folder, name):
    """Every `_extra_state` under its expert's number: the entries of a checkpoint without placement."""
    runs[f"{name}, plain"], runs[f"{name}, under a"]
    found = []
    for run in ("plain", "under_a"):
        reader = FileSystemReader(folder / f"{name}_{run}" / "iter_0000003")
        entries = reader.read_metadata().state_dict_metadata
        found.append({entry for entry in entries if "_extra_state" in entry and "experts" in entry})
    assert found[0] == found[1] and len(found[0]) == 2 * 8 * 2


def test_deduplicated_runs_follow_stock(runs):
    """Four terms a sum: rounded in another order, so close and not equal."""
    stock, ours = runs["top 4"], runs["top 4, dedup"]
    for plain, found in zip(stock.iterations, ours.iterations, strict=True):
        assert found["losses"]["lm loss"] == pytest.approx(plain["losses"]["lm loss"], rel=BF16_STEP)


@pytest.mark.parametrize(
    ("name", "without"), [("shuffled", "in order"), ("shuffled, precise, ciera", "in order, precise")]
)
def test_a_shuffled_run_starts_with_the_bits_of_the_plain_one(runs, name, without):
    ours, plain = runs[name], runs[without]
    first, wanted = ours.iterations[0], plain.iterations[0]
    assert first["losses"] == wanted["losses"]
    assert first["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=BF16_STEP)
    assert first["metrics"]["moe/shuffle_rows_moved"] > 0
    for found, expected in zip(ours.iterations, plain.iterations, strict=True):
        assert found["losses"]["lm loss"] == pytest.approx(expected["losses"]["lm loss"], rel=BF16_STEP)


@pytest.mark.parametrize("name", ["shuffled, recomputed", "shuffled, resumed"])
def test_shuffled_again_is_the_same(runs, name):
    through, run = runs["shuffled"], runs[name]
    assert run.parameters == through.parameters
    last = len(run.iterations)
    assert [record["losses"] for record in run.iterations] == [
        record["losses"] for record in through.iterations[-last:]
    ]
