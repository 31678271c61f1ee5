import pytest

from megatron_ciera import yaml_config
from megatron_ciera.errors import ConfigurationError

CLUSTER = """
cluster:
  gpu: A100
  nodes: 2
  gpus_per_node: 8
  memory_bandwidth_gb_s: 2039
  intra_node: {bandwidth_gb_s: 300, latency_us: 3}
  inter_node: {bandwidth_gb_s: 25, latency_us: 8}
"""


def write(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return str(path)


def test_values_are_passed_as_written(tmp_path):
    text = """
megatron:
  tensor-model-parallel-size: 8
  lr: 1e-4
  min_lr: 1.0e-05
  bf16: true
  swiglu: false
  tp-comm-overlap: null
  data-path: [0.3, a/b, 0.7, c]
  split: 969,30,1
  octal-looking: 010
"""
    config = yaml_config.load_config(write(tmp_path, text))
    assert config.flags == {
        "--tensor-model-parallel-size": ["8"],
        "--lr": ["1e-4"],
        "--min-lr": ["1.0e-05"],
        "--bf16": None,
        "--data-path": ["0.3", "a/b", "0.7", "c"],
        "--split": ["969,30,1"],
        "--octal-looking": ["010"],
    }
    assert config.cluster is None


def test_command_line_wins(tmp_path):
    config = yaml_config.load_config(write(tmp_path, "megatron: {lr: 1e-4, micro-batch-size: 2, bf16: true}"))
    known = {"--lr", "--micro-batch-size", "--bf16"}
    words = yaml_config.expand(config, ["--lr", "3e-4", "--micro-batch-size=4"], known)
    assert words == ["--bf16", "--lr", "3e-4", "--micro-batch-size=4"]


def test_megatron_reads_the_expanded_words(tmp_path, parse_flags):
    config = yaml_config.load_config(
        write(tmp_path, "megatron: {num-layers: 4, lr: 1e-4, bf16: true, ciera: true, data-path: [a, b]}")
    )
    known = {"--num-layers", "--lr", "--bf16", "--ciera", "--data-path"}
    args = parse_flags(yaml_config.expand(config, ["--num-layers", "6"], known))
    assert (args.num_layers, args.lr, args.bf16, args.ciera, args.data_path) == (
        6,
        1e-4,
        True,
        True,
        ["a", "b"],
    )


def test_cluster(tmp_path):
    cluster = yaml_config.load_config(write(tmp_path, CLUSTER)).cluster
    assert (cluster.gpu, cluster.nodes, cluster.gpus_per_node) == ("A100", 2, 8)
    assert cluster.inter_node.bandwidth_gb_s == 25.0
    assert cluster.inter_node.all_to_all_gb_s is None
    measured = CLUSTER.replace(
        "bandwidth_gb_s: 25", "reduce_gb_s: 20, all_to_all_gb_s: 18.5, bandwidth_gb_s: 25"
    )
    inter_node = yaml_config.load_config(write(tmp_path, measured)).cluster.inter_node
    assert (inter_node.bandwidth_gb_s, inter_node.reduce_gb_s, inter_node.all_to_all_gb_s) == (25, 20, 18.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("megatron: {lrr: 1}", "unknown key 'lrr'.*Did you mean 'lr'"),
        ("model: {lr: 1}", "unknown key 'model'.*megatron and cluster"),
        ("megatron: {lr: 1, lr: 2}", "'lr' is given twice"),
        ("megatron: {micro_batch_size: 1, micro-batch-size: 2}", "given twice"),
        ("megatron: [lr]", "needs a mapping"),
        ("megatron: {lr: {a: 1}}", "needs a value or a list"),
        ("megatron: {lr: [", "not valid YAML"),
        (CLUSTER.replace("gpu: A100", "gpus: A100"), "cluster: unknown key 'gpus'"),
        (
            CLUSTER.replace("bandwidth_gb_s: 25", "all_to_all_gb_s: 0, bandwidth_gb_s: 25"),
            "inter_node.all_to_all_gb_s: found '0', needs a positive number",
        ),
        (CLUSTER.replace("  nodes: 2\n", ""), "nodes missing"),
        (
            CLUSTER.replace("bandwidth_gb_s: 25", "bandwidth_gb_s: fast"),
            "inter_node.bandwidth_gb_s: found 'fast'",
        ),
        (CLUSTER.replace("nodes: 2", "nodes: 0"), "needs a positive number"),
        (
            CLUSTER.replace("{bandwidth_gb_s: 300, latency_us: 3}", "{bandwidth: 300}"),
            "unknown key 'bandwidth'",
        ),
    ],
)
def test_refusals(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        yaml_config.expand(yaml_config.load_config(write(tmp_path, text)), [], {"--lr", "--micro-batch-size"})


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(ConfigurationError, match="not a text file. Name a readable YAML file"):
        yaml_config.load_config(str(tmp_path / "run.yaml"))


def test_missing_file():
    with pytest.raises(ConfigurationError, match="--config nowhere.yaml: No such file"):
        yaml_config.load_config("nowhere.yaml")


@pytest.mark.parametrize(
    ("words", "path", "rest"),
    [
        (["--lr", "1", "--config", "a.yaml", "--bf16"], "a.yaml", ["--lr", "1", "--bf16"]),
        (["--config=a.yaml"], "a.yaml", []),
        (["--bf16"], None, ["--bf16"]),
    ],
)
def test_config_flag_is_taken_off(words, path, rest):
    assert yaml_config.take_config_flag(words) == (path, rest)


def test_config_without_name():
    with pytest.raises(ConfigurationError, match="--config: found no file name"):
        yaml_config.take_config_flag(["--bf16", "--config"])
