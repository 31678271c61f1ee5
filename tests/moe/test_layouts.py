"""Placement and deduplicating dispatch under the other parallelisms: the losses and weights of stock, bit for bit.

Top-2 and `--clip-grad 0`, as in test_training.py.
"""

import numpy as np
import pytest

from placement.file import DECODER, MTP, LayerId, LayerPlacement, Placement
from tests.launching import TINY, launch

FLAGS = [*TINY, "--clip-grad", "0", "--train-iters", "3", "--expert-model-parallel-size", "2"]
# name -> (decoder layers, MTP layers, flags); "stock dispatcher" in a name: placement alone
LAYOUTS = {
    "expert tensor parallel, stock dispatcher": (
        2,
        0,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2",
    ),
    "virtual pipeline, full recompute": (
        4,
        0,
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --global-batch-size 8",
    ),
    "MTP, tensor parallel, overlapped shared expert": (
        2,
        1,
        "--mtp-num-layers 1 --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
        "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap --moe-router-dtype fp32 "
        "--moe-z-loss-coeff 1e-3",
    ),
    "overlapped expert communication": (
        2,
        0,
        "--overlap-moe-expert-parallel-comm --moe-router-enable-expert-bias --moe-router-score-function sigmoid "
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-load-balancing-type seq_aux_loss",
    ),
}


def write_placement(path, decoder, mtp):
    rng = np.random.default_rng(0)
    ids = [LayerId(DECODER, layer) for layer in range(decoder)] + [
        LayerId(MTP, depth) for depth in range(mtp)
    ]
    layers = tuple(LayerPlacement(layer_id, rng.permutation(8)) for layer_id in ids)
    Placement(8, 2, 2, 2, layers, {"tokens": 64, "source": "test", "iteration": 1}).save(path)


def digests(run):
    """All parameters of all ranks, whatever slot they are in."""
    return sorted(digest for parameters in run.parameters.values() for digest in parameters.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(tmp_path, name):
    decoder, mtp, words = LAYOUTS[name]
    words = [*FLAGS, *words.split()]
    write_placement(tmp_path / "placement.json", decoder, mtp)
    placed = ["--correlated-placement", "--placement-file", tmp_path / "placement.json"]
    if "stock dispatcher" in name:
        placed.append("--no-dedup-dispatch")
    stock = launch(tmp_path / "stock", 4, words, timeout=500).check()
    ours = launch(tmp_path / "ours", 4, [*words, *placed], timeout=500).check()
    assert f"experts moved in {decoder + mtp} of {decoder + mtp} layers" in ours.output
    assert [record["losses"] for record in ours.iterations] == [
        record["losses"] for record in stock.iterations
    ]
    for record in ours.iterations:
        metrics = record["metrics"]
        sent = metrics["moe/rows_stock" if "stock dispatcher" in name else "moe/rows_distinct"]
        assert metrics["moe/rows_sent"] == sent
        assert metrics["moe/rows_distinct"] < metrics["moe/rows_stock"] == 2 * metrics["moe/tokens"]
        batch = 8 if "pipeline" in name else 4
        assert metrics["moe/tokens"] == (decoder + mtp) * batch * 64
    assert digests(stock) == digests(ours)


CLUSTER = """
cluster:
  gpu: none
  nodes: 2
  gpus_per_node: 2
  memory_bandwidth_gb_s: 10
  intra_node: {bandwidth_gb_s: 10, latency_us: 1}
  inter_node: {bandwidth_gb_s: 1, latency_us: 1}
"""


@pytest.mark.slow
def test_two_nodes_on_one_machine(tmp_path):
    """The config says that two ranks make a node: rows take two hops, with the bits of stock."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    words = [*FLAGS, "--expert-model-parallel-size", "4"]
    stock = launch(tmp_path / "stock", 4, words).check()
    config = ["--config", tmp_path / "cluster.yaml", "--dedup-dispatch"]
    ours = launch(tmp_path / "ours", 4, [*words, *config]).check()
    assert "span 2 nodes of 2 ranks" in ours.output and "two-hop deduplicating dispatcher" in ours.output
    assert [record["losses"] for record in ours.iterations] == [
        record["losses"] for record in stock.iterations
    ]
    assert digests(stock) == digests(ours)
    for record in ours.iterations:
        metrics = record["metrics"]
        assert metrics["moe/bytes_intra_node"] > 0 < metrics["moe/bytes_inter_node"]
        # A row that leaves the node may go to either of two ranks there: fewer than one for each rank.
        assert metrics["moe/bytes_inter_node"] < 2 * 128 * metrics["moe/rows_distinct"]
