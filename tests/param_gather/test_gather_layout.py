"""Cutting buckets: every value in exactly one segment, the same cut wherever it is made."""

import pytest

from megatron_ciera.param_gather.layout import (
    MIN_SEGMENT,
    ClassRun,
    cut_bucket,
    parameter_class,
    piece_lengths,
)

RUNS = [
    ClassRun(0, 20000, "expert"),
    ClassRun(20032, 20096, "norm"),
    ClassRun(20096, 50000, "attention"),
    ClassRun(50048, 61000, "embedding"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("piece_values", [1 << 30, 7000, 4096])
def test_every_value_is_in_one_segment(size, piece_values):
    total = 61440 // size * size
    pieces = cut_bucket(total, size, RUNS, piece_values)
    covered = []
    for piece in pieces:
        assert piece.length <= piece_values
        for owner, segments in enumerate(piece.segments):
            assert segments[0].start == piece.start
            for segment in segments:
                assert segment.owner == owner
                covered += range(
                    owner * total // size + segment.start,
                    owner * total // size + segment.start + segment.length,
                )
    assert sorted(covered) == list(range(total))


def test_first_and_last_piece_are_half_as_long():
    assert piece_lengths(1 << 27, 1 << 25) == [1 << 24, 1 << 25, 1 << 25, 1 << 25, 1 << 24]
    assert piece_lengths(1 << 20, 1 << 20) == [1 << 20]
    assert piece_lengths(0, 100) == []


def test_pieces_start_where_kernels_read_vectors():
    assert all(length % 64 == 0 for length in piece_lengths(64 * 1001, 7000)[:-1])
    assert all(length % 4096 == 0 for length in piece_lengths(64 * 100001, 1 << 20)[:-1])


def test_short_runs_join_their_neighbour():
    (piece,) = cut_bucket(61440, 1, RUNS, 1 << 30)
    assert [segment.kind for segment in piece.segments[0]] == ["expert", "attention", "embedding"]
    assert all(segment.length >= MIN_SEGMENT for segment in piece.segments[0])


def test_bucket_smaller_than_a_segment():
    (piece,) = cut_bucket(128, 2, [ClassRun(0, 64, "norm"), ClassRun(64, 128, "router")], 1 << 20)
    assert [len(segments) for segments in piece.segments] == [1, 1]


def test_bucket_without_parameters_is_still_cut():
    (piece,) = cut_bucket(256, 2, [], 1 << 20)
    assert piece.segments[1][0].kind == "other"


def test_uneven_bucket_is_refused():
    with pytest.raises(ValueError, match="1000 values cannot be cut into 3 equal shards"):
        cut_bucket(1000, 3, RUNS, 4096)


@pytest.mark.parametrize(
    "name, kind",
    [
        ("module.decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", "expert"),
        ("decoder.layers.1.mlp.experts.linear_fc2.weight7", "expert"),
        ("decoder.layers.1.mlp.shared_experts.linear_fc2.weight", "mlp"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "norm"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "norm"),
        ("decoder.layers.0.self_attention.linear_qkv.weight", "attention"),
        ("decoder.layers.0.self_attention.q_layernorm.weight", "norm"),
        ("decoder.layers.0.input_layernorm.weight", "norm"),
        ("decoder.final_layernorm.weight", "norm"),
        ("decoder.layers.0.mlp.router.weight", "router"),
        ("decoder.layers.0.mlp.router.expert_bias", "router"),
        ("embedding.word_embeddings.weight", "embedding"),
        ("output_layer.weight", "embedding"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "mlp"),
        ("mtp.layers.0.eh_proj.weight", "other"),
    ],
)
def test_classes_of_megatron_names(name, kind):
    assert parameter_class(name) == kind
