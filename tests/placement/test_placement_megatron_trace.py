"""Megatron routing traces: order of tokens, pipeline stages, recomputation, MTP, damage."""

import json
import subprocess
import sys

import numpy as np
import pytest
from placement_traces import coupled_routing, record, write_rank, write_run

from placement.file import LayerId
from placement.stage_check import dependence
from placement.trace import open_trace, read_tokens
from tests.launching import ROOT


def whole(reader):
    return np.concatenate(list(reader.blocks()), axis=1)


@pytest.mark.parametrize("stages", [1, 2])
def test_order_is_step_record_rank(tmp_path, stages):
    routing = coupled_routing(layers=4, tokens=2 * 3 * 2 * 8)
    write_run(tmp_path, routing, steps=2, records=3, ranks=2, tokens=8, stages=stages, first_step=5)
    reader = open_trace([tmp_path], pipeline_parallel_size=stages)
    assert np.array_equal(whole(reader), routing)
    assert reader.layer_ids == tuple(LayerId("decoder", layer) for layer in range(4))
    assert reader.iteration == 6 and reader.notes == []


def test_window(tmp_path):
    routing = coupled_routing(layers=2, tokens=64)
    write_run(tmp_path, routing, steps=4, records=1, ranks=2, tokens=8)
    tokens = read_tokens(open_trace([tmp_path]), skip_tokens=10, num_tokens=20)
    assert np.array_equal(tokens.top_indices, routing[:, 10:30])
    with pytest.raises(ValueError, match="64 tokens, asked for --skip-tokens 10 --num-tokens 60"):
        read_tokens(open_trace([tmp_path]), skip_tokens=10, num_tokens=60)


def test_rank_files_sort_by_number(tmp_path):
    routing = coupled_routing(layers=1, tokens=12 * 2)
    write_run(tmp_path, routing, steps=1, records=1, ranks=12, tokens=2)
    assert np.array_equal(whole(open_trace([tmp_path])), routing)


def test_more_ranks_than_open_files(tmp_path):
    """The soft limit is raised; a hard limit that is too low is named."""
    routing = coupled_routing(layers=1, tokens=64 * 2)
    write_run(tmp_path, routing, steps=1, records=1, ranks=64, tokens=2)
    read = (
        "import resource, sys; from placement.trace import open_trace; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, int(sys.argv[2]))); "
        "print(sum(block.shape[1] for block in open_trace([sys.argv[1]]).blocks()))"
    )
    for hard, wanted in (
        (4096, "128\n"),
        (100, "a trace of 64 ranks needs 128 open files, this system allows 100"),
    ):
        found = subprocess.run(
            [sys.executable, "-c", read, tmp_path, str(hard)], capture_output=True, text=True, cwd=ROOT
        )
        assert wanted in found.stdout + found.stderr


def test_recomputed_records_are_dropped(tmp_path):
    routing = coupled_routing(layers=2, tokens=24)
    first, second = routing[:, :12], routing[:, 12:]
    lines = []
    for part in (first, second):
        lines += [record(0, layer, part[layer]) for layer in (0, 1)]
        lines += [record(0, layer, part[layer]) for layer in (1, 0)]
    write_rank(tmp_path, 0, lines)
    reader = open_trace([tmp_path])
    assert np.array_equal(whole(reader), routing)
    assert "4 repeated records" in reader.notes[0]


def test_recomputation_of_some_layers_only(tmp_path):
    routing = coupled_routing(layers=2, tokens=12)
    write_rank(tmp_path, 0, [record(0, layer, routing[layer]) for layer in (0, 1, 1)])
    assert np.array_equal(whole(open_trace([tmp_path])), routing)


def test_equal_micro_batches_of_one_layer_are_kept_when_nothing_was_recomputed(tmp_path):
    lines = [record(0, 0, [[0, 1]]), record(0, 1, [[2, 3]]), record(0, 0, [[0, 1]]), record(0, 1, [[4, 5]])]
    write_rank(tmp_path, 0, lines)
    assert whole(open_trace([tmp_path])).tolist() == [[[0, 1], [0, 1]], [[2, 3], [4, 5]]]


def test_ranks_with_the_same_tokens_count_once(tmp_path):
    routing = coupled_routing(layers=2, tokens=8)
    for rank in (0, 1):
        write_rank(tmp_path, rank, [record(0, layer, routing[layer], rank) for layer in (0, 1)])
    reader = open_trace([tmp_path])
    assert np.array_equal(whole(reader), routing)
    assert reader.notes


def test_mtp_records_on_the_last_stage(tmp_path):
    routing = coupled_routing(layers=3, tokens=8)
    write_rank(tmp_path, 0, [record(0, 0, routing[0])])
    lines = [record(0, 0, routing[1], 1), record(0, 0, routing[2], 1, "mtp", 0)]
    write_rank(tmp_path, 1, lines)
    reader = open_trace([tmp_path], pipeline_parallel_size=2)
    assert reader.layer_ids == (LayerId("decoder", 0), LayerId("decoder", 1), LayerId("mtp", 0))
    assert np.array_equal(whole(reader), routing)
    with pytest.raises(
        ValueError, match="MTP layer 0 is missing, rank 1 has it.*pipeline-model-parallel-size"
    ):
        open_trace([tmp_path])


def test_uneven_stages_need_the_number_of_layers(tmp_path):
    routing = coupled_routing(layers=3, tokens=8)
    write_rank(tmp_path, 0, [record(0, 1, routing[0]), record(0, 2, routing[1])])
    write_rank(tmp_path, 1, [record(0, 0, routing[2], 1)])
    with pytest.raises(ValueError, match=r"stages have \[3, 1\] layers .*--layers-per-stage"):
        open_trace([tmp_path], pipeline_parallel_size=2)
    reader = open_trace([tmp_path], pipeline_parallel_size=2, layers_per_stage=[3, 2])
    assert [layer.layer for layer in reader.layer_ids] == [1, 2, 3]
    with pytest.raises(ValueError, match="--layers-per-stage 2 for stage 0"):
        open_trace([tmp_path], pipeline_parallel_size=2, layers_per_stage=[2])


def test_pipeline_needs_all_rank_files(tmp_path):
    routing = coupled_routing(layers=1, tokens=8)
    for rank in (0, 2):
        write_rank(tmp_path, rank, [record(0, 0, routing[0], rank)])
    with pytest.raises(ValueError, match="rank files 0, 2 with --pipeline-model-parallel-size 2"):
        open_trace([tmp_path], pipeline_parallel_size=2)


def lines_of_run(routing, steps):
    return [
        record(step, layer, part[layer])
        for step, part in enumerate(np.split(routing, steps, axis=1))
        for layer in range(len(routing))
    ]


def test_half_written_last_line(tmp_path):
    routing = coupled_routing(layers=2, tokens=30)
    lines = lines_of_run(routing, 3)
    write_rank(tmp_path, 0, [*lines[:-1], lines[-1][:40]], end="")
    reader = open_trace([tmp_path])
    assert np.array_equal(whole(reader), routing[:, :20])
    assert any("incomplete" in note for note in reader.notes)


@pytest.mark.parametrize(
    "damage", ["{", "[]", "\x00\x00", '{"step": 1}', '{"step": "x", "block": "decoder", "layer": 0}']
)
def test_damaged_line_leaves_out_its_step(tmp_path, damage):
    routing = coupled_routing(layers=2, tokens=40 * 4)
    lines = lines_of_run(routing, 40)
    lines[20] = damage
    write_rank(tmp_path, 0, lines)
    reader = open_trace([tmp_path])
    assert np.array_equal(whole(reader), np.delete(routing, range(40, 44), axis=1))
    assert "1 damaged lines" in reader.notes[0]


def test_line_with_wrong_shape_is_damaged(tmp_path):
    lines = lines_of_run(coupled_routing(layers=1, tokens=80), 40)
    broken = json.loads(lines[3])
    broken["top_indices"][0] = [1]
    lines[3] = json.dumps(broken)
    write_rank(tmp_path, 0, lines)
    reader = open_trace([tmp_path])
    assert whole(reader).shape == (1, 78, 2)
    assert reader.num_damaged == 1


def test_too_many_damaged_lines(tmp_path):
    lines = lines_of_run(coupled_routing(layers=2, tokens=40), 10)
    lines[4] = lines[9] = lines[12] = "{"
    write_rank(tmp_path, 0, lines)
    with pytest.raises(ValueError, match="3 of 20 lines are damaged"):
        whole(open_trace([tmp_path]))


def test_layer_missing_in_a_later_step(tmp_path):
    lines = lines_of_run(coupled_routing(layers=3, tokens=40), 4)
    del lines[7]
    write_rank(tmp_path, 0, lines)
    with pytest.raises(ValueError, match="step 2: layer 1 has 0 records .* other layers have 1"):
        whole(open_trace([tmp_path]))


def test_layer_missing_on_one_rank(tmp_path):
    routing = coupled_routing(layers=2, tokens=8)
    write_rank(tmp_path, 0, [record(0, 0, routing[0]), record(0, 1, routing[1])])
    write_rank(tmp_path, 1, [record(0, 0, routing[0], 1)])
    with pytest.raises(ValueError, match="rank1.jsonl: layer 1 is missing, rank 0 has it"):
        open_trace([tmp_path])


def test_empty_traces(tmp_path):
    with pytest.raises(ValueError, match="no router_trace_rank"):
        open_trace([tmp_path])
    write_rank(tmp_path, 0, [], end="")
    with pytest.raises(ValueError, match="empty, no routing records"):
        open_trace([tmp_path])
    with pytest.raises(ValueError, match="no such file or folder"):
        open_trace([tmp_path / "nowhere"])


def test_two_runs_in_one_file(tmp_path):
    lines = lines_of_run(coupled_routing(layers=1, tokens=20), 2)
    write_rank(tmp_path, 0, lines + lines)
    with pytest.raises(ValueError, match="step 0 follows step 1"):
        whole(open_trace([tmp_path]))


def dependent_layers(tokens, layers=4, num_experts=16):
    """[layers, tokens, 2]: every layer's experts are a noisy image of the layer before."""
    rng = np.random.default_rng(0)
    routing = [coupled_routing(1, tokens, num_experts)[0]]
    for _ in range(layers - 1):
        image = rng.permutation(num_experts)[routing[-1]]
        other = coupled_routing(1, tokens, num_experts, seed=1)[0]
        routing.append(np.where(rng.random((tokens, 1)) < 0.4, image, other).astype(np.int32))
    return np.stack(routing)


def test_stages_with_equal_layer_numbers_are_found_without_the_flag(tmp_path):
    routing = dependent_layers(tokens=4 * 512)
    write_run(tmp_path, routing, steps=1, records=2, ranks=2, tokens=512, stages=2)
    message = "ranks 0 and 2 route the same tokens at different layers.*parallel-size .*2 would fit"
    with pytest.raises(ValueError, match=message):
        open_trace([tmp_path])
    assert np.array_equal(whole(open_trace([tmp_path], pipeline_parallel_size=2)), routing)


def test_data_parallel_ranks_are_no_stages(tmp_path):
    routing = dependent_layers(tokens=4 * 1024, layers=2)
    write_run(tmp_path, routing, steps=1, records=1, ranks=4, tokens=1024)
    assert np.array_equal(whole(open_trace([tmp_path])), routing)


@pytest.mark.parametrize("shift, stages", [(0, True), (7, False), (500, False)])
def test_dependence_needs_equal_positions(shift, stages):
    routing = dependent_layers(tokens=1024)[:, :, 0]
    assert (dependence(routing[:2], np.roll(routing[2:], shift, axis=1)) > 10) == stages
