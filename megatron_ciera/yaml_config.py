"""`--config FILE`: Megatron flags and a cluster description in YAML.

The file becomes command-line words in front of the user's own, so that Megatron's parser reads both and the
command line wins. Scalars are passed as written in the file (`1e-4` stays `1e-4`).
"""

import difflib
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_ciera.cluster import Cluster, cluster_from_mapping
from megatron_ciera.errors import ConfigurationError

TOP_LEVEL = ("megatron", "cluster")


@dataclass(frozen=True)
class RunConfig:
    """A parsed config file. `flags` maps `--flag-name` to its values; None means the bare flag."""

    path: str
    flags: dict[str, list[str] | None]
    cluster: Cluster | None


def load_config(path: str) -> RunConfig:
    """Reads and checks a config file.

    Raises:
        ConfigurationError: the file is missing or not YAML, or a key is unknown or given twice.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "not a text file")
        raise ConfigurationError(
            f"--config {path}: {reason}. Name a readable YAML file; configs/ of a clone has examples."
        ) from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"--config {path}: not valid YAML. {error}") from error
    sections = _mapping(root, path) if root is not None else {}
    for key in sections:
        if key not in TOP_LEVEL:
            raise ConfigurationError(
                f"--config {path}: unknown key {key!r}. Top-level keys are {' and '.join(TOP_LEVEL)}; "
                "Megatron flags go under `megatron:`."
            )
    flags = {}
    if "megatron" in sections:
        for key, node in _mapping(sections["megatron"], f"{path}: megatron").items():
            spelled = "--" + key.lstrip("-").replace("_", "-")
            if spelled in flags:
                raise ConfigurationError(f"--config {path}: {key!r} is given twice. Keep one of them.")
            flags[spelled] = _flag_values(node, f"{path}: megatron.{key}")
    cluster = None
    if "cluster" in sections:
        cluster = cluster_from_mapping(_plain(sections["cluster"], f"{path}: cluster"), f"--config {path}")
    return RunConfig(path, {flag: values for flag, values in flags.items() if values != []}, cluster)


def take_config_flag(argv: list[str]) -> tuple[str | None, list[str]]:
    """Splits `--config FILE` or `--config=FILE` off a command line: (file or None, the rest)."""
    path, rest = None, []
    words = iter(argv)
    for word in words:
        if word == "--config":
            path = next(words, None)
            if path is None:
                raise ConfigurationError("--config: found no file name after it. Name a YAML file.")
        elif word.startswith("--config="):
            path = word.split("=", 1)[1]
        else:
            rest.append(word)
    return path, rest


def expand(config: RunConfig, argv: list[str], known_flags: set[str]) -> list[str]:
    """The command line with the file's flags in front; flags that `argv` names are left out.

    Args:
        config: parsed file.
        argv: the user's own words.
        known_flags: every option string of the parser that will read the result.

    Raises:
        ConfigurationError: the file has a flag that no parser of this run knows.
    """
    by_dashes = {flag.replace("_", "-"): flag for flag in known_flags}
    on_command_line = {word.split("=", 1)[0].replace("_", "-") for word in argv if word.startswith("--")}
    words = []
    for flag, values in config.flags.items():
        if flag not in by_dashes:
            close = difflib.get_close_matches(flag, by_dashes, n=1)
            hint = f" Did you mean {close[0][2:]!r}?" if close else ""
            raise ConfigurationError(
                f"--config {config.path}: unknown key {flag[2:]!r} under `megatron:`; no flag of this run has "
                f"that name.{hint} Correct or remove it."
            )
        if flag not in on_command_line:
            words += [by_dashes[flag], *(values or [])]
    return words + argv


def _mapping(node: yaml.Node, where: str) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(f"--config {where}: needs a mapping of keys to values.")
    pairs = {}
    for key, value in node.value:
        if key.value in pairs:
            raise ConfigurationError(f"--config {where}: {key.value!r} is given twice. Keep one of them.")
        pairs[key.value] = value
    return pairs


def _flag_values(node: yaml.Node, where: str) -> list[str] | None:
    """None: bare flag. Empty list: flag not given. Otherwise the values, as written."""
    if isinstance(node, yaml.SequenceNode):
        return [_scalar(item, where) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        if node.tag == "tag:yaml.org,2002:null":
            return []
        if node.tag == "tag:yaml.org,2002:bool" and node.value.lower() in ("true", "false"):
            return None if node.value.lower() == "true" else []
    return [_scalar(node, where)]


def _scalar(node: yaml.Node, where: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise ConfigurationError(f"--config {where}: needs a value or a list of values, found a mapping.")
    return node.value


def _plain(node: yaml.Node, where: str):
    if isinstance(node, yaml.MappingNode):
        return {key: _plain(value, f"{where}.{key}") for key, value in _mapping(node, where).items()}
    return _scalar(node, where)
