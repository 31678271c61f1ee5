"""Every file in configs/ goes the launcher's way: our expansion, Megatron's parser and validation, our rules."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ciera import flags, install, validation, yaml_config
from megatron_ciera.errors import ConfigurationError
from megatron_ciera.simulator.job import job_from_config
from megatron_ciera.simulator.model import stage_parameters
from megatron_ciera.simulator.network import links
from tests.launching import launch

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def validated(parse_flags):
    """Parses and validates a config at its own world size, with more words on the command line."""
    from megatron.training import arguments

    known = install._option_strings(None)

    monkeypatch = pytest.MonkeyPatch()

    def parse(path: Path, words: str):
        config = yaml_config.load_config(str(path))
        world = config.cluster.nodes * config.cluster.gpus_per_node
        monkeypatch.setenv("WORLD_SIZE", str(world))
        # Sequence parallelism: validate_args wants it, as the launch command of the file says.
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        argv = yaml_config.expand(config, words.split(), known)
        args = parse_flags(argv, world)
        validation.before_megatron(args)
        # The original below our wrapper, which would end the process on an error.
        original = arguments.validate_args._megatron_ciera_original
        original(args, {})
        validation.after_megatron(args)
        return args, flags.config_from_args(args, config.cluster)

    yield parse
    monkeypatch.undo()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_passes_megatron_and_our_rules(path, validated):
    sends_rows = job_from_config(yaml_config.load_config(str(path))).expert > 1
    args, config = validated(
        path, "--ciera --correlated-placement --dedup-dispatch" if sends_rows else "--ciera"
    )
    cluster = config.cluster
    assert args.world_size == cluster.nodes * cluster.gpus_per_node
    assert args.tensor_model_parallel_size * args.data_parallel_size == args.world_size
    assert config.ciera and config.correlated_placement == config.dedup_dispatch == sends_rows
    assert args.num_experts % args.expert_model_parallel_size == 0
    assert cluster.intra_node.bandwidth_gb_s > cluster.inter_node.bandwidth_gb_s
    # The simulator reads the same file without Megatron and must find what Megatron found.
    job = job_from_config(yaml_config.load_config(str(path)))
    assert (job.world, job.data, job.tensor, job.expert, job.pipeline, job.expert_tensor) == (
        args.world_size,
        args.data_parallel_size,
        args.tensor_model_parallel_size,
        args.expert_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    )
    assert (job.num_layers, job.hidden, job.ffn, job.expert_ffn, job.topk, job.head_width) == (
        args.num_layers,
        args.hidden_size,
        args.ffn_hidden_size,
        args.moe_ffn_hidden_size,
        args.moe_router_topk,
        args.kv_channels,
    )
    assert job.query_groups == (args.num_query_groups if args.group_query_attention else job.heads)
    assert job.tokens_per_step == args.global_batch_size * args.seq_length
    moe = args.moe_layer_freq
    assert job.is_moe == tuple(bool(one) for one in (moe if isinstance(moe, list) else [1] * job.num_layers))
    assert job.gated == args.swiglu and job.tied_embeddings != args.untie_embeddings_and_output_weights
    assert (job.overlap_grad_reduce, job.overlap_param_gather) == (
        args.overlap_grad_reduce,
        args.overlap_param_gather,
    )
    assert links(cluster) == {
        "intra": cluster.intra_node.bandwidth_gb_s * 1e9,
        "inter": cluster.inter_node.bandwidth_gb_s * 1e9,
    }


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("olmoe_1b_7b_a100_2n", 6.92),
        ("olmoe_1b_7b_h200_1n", 6.92),
        ("deepseek_moe_16b_a100_2n", 16.4),
        ("qwen2_57b_a14b_a100_4n", 57.4),
        ("minicpm_moe_8x2b_a100_2n", 13.6 + 0.28),  # published without embeddings
        ("mixtral_8x7b_a100_4n", 46.7),
    ],
)
def test_models_have_their_published_size(name, billions):
    path = next(path for path in CONFIGS if path.stem == name)
    job = replace(job_from_config(yaml_config.load_config(str(path))), tensor=1, expert=1)
    held = stage_parameters(job, 0)
    assert (held.dense + held.expert) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_header_states_what_the_file_does(path):
    config = yaml_config.load_config(str(path))
    number = {flag: int(values[0]) for flag, values in config.flags.items() if values and values[0].isdigit()}
    header = path.read_text().partition("megatron:")[0]
    for word in ("Launch", f"--config configs/{path.name}", "Hardware:", "Groups:", "Batch:", "Measured:"):
        assert word in header
    world = config.cluster.nodes * config.cluster.gpus_per_node
    data_parallel = world // number.get("--tensor-model-parallel-size", 1)
    micro_batches = number["--global-batch-size"] // (number["--micro-batch-size"] * data_parallel)
    assert f"DP {data_parallel} × {micro_batches} micro-batches" in header
    expert_parallel = number["--expert-model-parallel-size"]
    assert f"EP {expert_parallel} × expert DP {world // expert_parallel}" in header
    assert f"{number['--global-batch-size'] * number['--seq-length']:,} tokens a step" in header


def test_all_layouts_of_the_papers_are_there():
    names = {path.stem for path in CONFIGS}
    assert {"tiny_cpu", "olmoe_1b_7b_h200_1n"} <= names
    for model in ("olmoe_1b_7b", "deepseek_moe_16b", "qwen2_57b_a14b", "minicpm_moe_8x2b", "mixtral_8x7b"):
        assert any(name.startswith(f"{model}_a100") for name in names)
    for topk in (2, 6):
        for layout in ("tp1_ep8", "tp1_ep16", "tp1_ep32", "tp1_ep64", "tp8_ep8", "tp16_ep16"):
            assert any(name.startswith(f"coupling_top{topk}_{layout}_mi300x") for name in names)


def test_a_parallel_size_that_does_not_fit_is_found(validated):
    path = next(path for path in CONFIGS if path.stem == "tiny_cpu")
    with pytest.raises(ConfigurationError, match="--nproc-per-node"):
        validated(path, "--ciera --expert-model-parallel-size 3")


def test_tiny_cpu_trains(tmp_path):
    config = next(path for path in CONFIGS if path.stem == "tiny_cpu")
    run = launch(tmp_path / "run", 4, ["--config", config, "--train-iters", "3"]).check()
    losses = [record["losses"]["lm loss"] for record in run.iterations]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
