"""Megatron routing traces: order of tokens, pipeline stages, recomputation, MTP, damage."""

import json
import subprocess
import sys

import numpy as np
import pytest
from placement_traces import coupled_routing, record, write_rank, write_run

from placement.file import LayerId
from placement.rank_file import AGAIN, last_step
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
    assert reader.iteration == 6
    assert [note for note in reader.notes if "left out" in note] == []


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


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_folder_needs_every_rank(tmp_path, missing):
    routing = coupled_routing(layers=2, tokens=32)
    write_run(tmp_path, routing, steps=2, records=1, ranks=4, tokens=4)
    (tmp_path / f"router_trace_rank{missing}.jsonl").unlink()
    message = rf"no router_trace_rank{missing}.jsonl .*every rank from 0 to 3.* copy the files of all nodes"
    for options in ({}, {"pipeline_parallel_size": 2}):
        with pytest.raises(ValueError, match=message):
            open_trace([tmp_path], **options)
    files = sorted(tmp_path.iterdir())
    assert whole(open_trace(files)).shape == (2, 24, 2)
    with pytest.raises(ValueError, match=message):
        open_trace(files, pipeline_parallel_size=2)


def test_ranks_in_the_folders_of_two_nodes(tmp_path):
    routing = coupled_routing(layers=2, tokens=16)
    write_run(tmp_path / "a", routing, steps=2, records=1, ranks=4, tokens=2)
    (tmp_path / "b").mkdir()
    for rank in (2, 3):
        file = tmp_path / "a" / f"router_trace_rank{rank}.jsonl"
        file.rename(tmp_path / "b" / file.name)
    assert np.array_equal(whole(open_trace([tmp_path / "b", tmp_path / "a"])), routing)
    with pytest.raises(ValueError, match="ranks missing: 0, 1"):
        open_trace([tmp_path / "b"])


def test_stages_divide_the_ranks(tmp_path):
    write_run(tmp_path, coupled_routing(layers=1, tokens=12), steps=1, records=1, ranks=3, tokens=4)
    with pytest.raises(
        ValueError, match="3 ranks with --pipeline-model-parallel-size 2: wanted .* divisible"
    ):
        open_trace([tmp_path], pipeline_parallel_size=2)


def test_a_stage_without_moe_layers_has_empty_files(tmp_path):
    routing = coupled_routing(layers=2, tokens=16)
    write_run(tmp_path / "last", routing, steps=2, records=1, ranks=2, tokens=4)
    for rank in (0, 1):
        write_rank(tmp_path / "run", rank, [], end="")
        lines = (tmp_path / "last" / f"router_trace_rank{rank}.jsonl").read_text()
        lines = lines.replace(f'"rank": {rank}', f'"rank": {rank + 2}')
        write_rank(tmp_path / "run", rank + 2, [lines], end="")
    reader = open_trace([tmp_path / "run"], pipeline_parallel_size=2, layers_per_stage=[2])
    assert [layer.layer for layer in reader.layer_ids] == [2, 3]
    assert np.array_equal(whole(reader), routing)
    with pytest.raises(ValueError, match="rank0.jsonl: has no whole record.*--pipeline-model-parallel-size"):
        open_trace([tmp_path / "run"])


def lines_of_run(routing, steps):
    return [
        record(step, layer, part[layer])
        for step, part in enumerate(np.split(routing, steps, axis=1))
        for layer in range(len(routing))
    ]


def write_lines(folder, routing, steps, keep):
    """A run of two ranks; `keep[rank]`: how much of its text (characters, or a function of the text) is there."""
    halves = routing.reshape(len(routing), steps, 2, -1, routing.shape[2])
    for rank, cut in enumerate(keep):
        part = halves[:, :, rank].reshape(len(routing), -1, routing.shape[2])
        lines = [line.replace('"rank": 0', f'"rank": {rank}') for line in lines_of_run(part, steps)]
        write_rank(folder, rank, [cut("\n".join(lines) + "\n")], end="")


def all_of(text):
    return text


def half_a_line_less(text):
    return text[:-40]


def lines_less(number):
    return lambda text: "".join(text.splitlines(keepends=True)[:-number])


def all_but_the_start(text):
    return text[:5]


@pytest.mark.parametrize(
    "keep, records",
    [
        ((all_of, half_a_line_less), 3),
        ((half_a_line_less, half_a_line_less), 2),
        ((lines_less(1), all_of), 3),
        ((lines_less(2), all_of), 2),
        ((lambda text: lines_less(2)(text) + text.splitlines()[-2][:40], all_of), 2),
    ],
)
def test_a_killed_run_loses_its_last_step(tmp_path, keep, records):
    routing = coupled_routing(layers=2, tokens=2 * 3 * 8)
    write_lines(tmp_path, routing, 3, keep)
    reader = open_trace([tmp_path])
    assert np.array_equal(whole(reader), routing[:, :32])
    assert [f"the last step, 2, left out ({records} whole records)" in note for note in reader.notes] == [
        True
    ]


def test_a_line_cut_before_its_step_leaves_the_step_before(tmp_path):
    routing = coupled_routing(layers=2, tokens=20)
    lines = lines_of_run(routing, 2)
    write_rank(tmp_path, 0, [*lines, '{"step": 2, "stage": "pre'], end="")
    assert np.array_equal(whole(open_trace([tmp_path])), routing)


@pytest.mark.parametrize(
    "step, wanted", [(0, "no whole record"), (1, "ends at step 0"), (2, "ends at step 1")]
)
@pytest.mark.parametrize("within", ["line", "step"])
def test_a_rank_cut_in_the_middle_is_refused_by_its_end(tmp_path, step, wanted, within):
    """Nothing but the end of a file is read for it, so that a short window of a long trace finds it too."""
    routing = coupled_routing(layers=2, tokens=2 * 5 * 8)
    lost = 2 * (5 - step)
    cut = lines_less(lost)
    keep = cut if within == "step" else lambda text: cut(text) + text.splitlines()[-lost][:40]
    write_lines(tmp_path, routing, 5, (all_of, keep))
    message = rf"rank1.jsonl: .*{wanted}, router_trace_rank0.jsonl ends at step 4; wanted .*{AGAIN}"
    with pytest.raises(ValueError, match=message):
        open_trace([tmp_path])


def test_a_step_that_one_rank_lacks_is_refused(tmp_path):
    routing = coupled_routing(layers=2, tokens=2 * 4 * 8)

    def without_step_two(text):
        lines = text.splitlines(keepends=True)
        return "".join(lines[:4] + lines[6:])

    write_lines(tmp_path, routing, 4, (all_of, without_step_two))
    with pytest.raises(ValueError, match="rank1.jsonl: has no records at step 2"):
        whole(open_trace([tmp_path]))


@pytest.mark.parametrize(
    "damage", ["{", "[]", "\x00\x00", '{"step": 1}', '{"step": "x", "block": "decoder", "layer": 0}']
)
def test_a_damaged_line_is_refused(tmp_path, damage):
    lines = lines_of_run(coupled_routing(layers=2, tokens=40 * 4), 40)
    lines[20] = damage
    write_rank(tmp_path, 0, lines)
    message = rf"router_trace_rank0.jsonl, line 21: found .*wanted a whole record of rank 0.*{AGAIN}"
    with pytest.raises(ValueError, match=message):
        whole(open_trace([tmp_path]))


def test_a_line_cut_and_gone_on_with_is_damaged(tmp_path):
    lines = lines_of_run(coupled_routing(layers=1, tokens=80), 40)
    write_rank(tmp_path, 0, [*lines[:20], lines[20][:50] + lines[21], *lines[22:]])
    with pytest.raises(ValueError, match="line 21: found"):
        whole(open_trace([tmp_path]))


def test_records_that_do_not_fit_their_header_are_damaged(tmp_path):
    lines = lines_of_run(coupled_routing(layers=1, tokens=80), 40)
    for changes in ({"top_indices": [[1], [1, 2]]}, {"num_tokens": 3}, {"rank": 1}):
        broken = json.dumps({**json.loads(lines[3]), **changes})
        write_rank(tmp_path, 0, [*lines[:3], broken, *lines[4:]])
        with pytest.raises(ValueError, match="line 4: found .* record of rank 0"):
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
    with pytest.raises(ValueError, match="line 3: step 0 follows step 1, wanted steps that rise"):
        whole(open_trace([tmp_path]))


@pytest.mark.parametrize(
    "steps, appended, message",
    [
        (4, slice(0, 2), "rank0.jsonl: ends at step 0, router_trace_rank1.jsonl ends at step 3"),
        (4, slice(0, 8), "rank0.jsonl, line 9: step 0 follows step 3"),
        (1, slice(0, 2), "rank1.jsonl: step 0: layer 0 has 1 records, router_trace_rank0.jsonl has 2"),
    ],
)
def test_another_run_appended_to_one_rank(tmp_path, steps, appended, message):
    write_lines(tmp_path, coupled_routing(layers=2, tokens=2 * steps * 8), steps, (all_of, all_of))
    other = lines_of_run(coupled_routing(layers=2, tokens=steps * 8, seed=1), steps)
    with open(tmp_path / "router_trace_rank0.jsonl", "a") as file:
        file.write("\n".join(other[appended]) + "\n")
    with pytest.raises(ValueError, match=message):
        whole(open_trace([tmp_path]))


def test_ends_of_long_lines_are_found(tmp_path):
    """Lines longer than what is read at once from the end."""
    routing = coupled_routing(layers=1, tokens=3 * 30000)
    write_rank(tmp_path, 0, lines_of_run(routing, 3))
    assert last_step(tmp_path / "router_trace_rank0.jsonl") == 2
    with open(tmp_path / "router_trace_rank0.jsonl", "r+") as file:
        file.truncate(file.seek(0, 2) - 100)
    assert last_step(tmp_path / "router_trace_rank0.jsonl") == 1


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


def test_ranks_that_are_no_stages_are_refused(tmp_path):
    """A run without pipeline, read with two stages: ranks of different tokens, whatever their layer numbers."""
    routing = dependent_layers(tokens=4 * 1024)
    write_run(tmp_path, routing, steps=1, records=1, ranks=4, tokens=1024)
    with pytest.raises(ValueError, match="makes ranks 0, 2 stages .* do not route the same tokens"):
        whole(open_trace([tmp_path], pipeline_parallel_size=2))


def test_ranks_that_are_no_stages_are_refused_in_short_steps(tmp_path):
    """Steps too short to tell by one alone are added up."""
    routing = dependent_layers(tokens=2 * 12 * 128)
    write_run(tmp_path, routing, steps=12, records=1, ranks=2, tokens=128)
    with pytest.raises(ValueError, match="do not route the same tokens"):
        whole(open_trace([tmp_path], pipeline_parallel_size=2))


def test_copies_of_a_rank_are_no_stages(tmp_path):
    routing = dependent_layers(tokens=1024)
    for rank in (0, 1):
        write_rank(tmp_path, rank, [record(0, layer, routing[layer], rank) for layer in range(4)])
    with pytest.raises(ValueError, match="do not route the same tokens"):
        whole(open_trace([tmp_path], pipeline_parallel_size=2))


def test_real_stages_are_shown_and_unclear_ones_noted(tmp_path):
    routing = dependent_layers(tokens=4 * 512)
    write_run(tmp_path / "long", routing, steps=1, records=2, ranks=2, tokens=512, stages=2)
    reader = open_trace([tmp_path / "long"], pipeline_parallel_size=2)
    whole(reader)
    assert reader.notes == []
    write_run(tmp_path / "short", routing[:, :64], steps=1, records=1, ranks=2, tokens=32, stages=2)
    reader = open_trace([tmp_path / "short"], pipeline_parallel_size=2)
    whole(reader)
    assert "2 stages with 4 MoE layers in all" in reader.notes[0]


def test_too_few_stages_are_found(tmp_path):
    routing = dependent_layers(tokens=2 * 1024, layers=8)
    write_run(tmp_path, routing, steps=1, records=1, ranks=2, tokens=1024, stages=4)
    with pytest.raises(ValueError, match=r"ranks 0 and 2 route the same tokens.*\(found 2; 4 would fit\)"):
        open_trace([tmp_path], pipeline_parallel_size=2)
