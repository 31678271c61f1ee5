"""The only wiring between Megatron and this package.

`install` puts two seams into the argument parser. Everything else is attached only when a flag of ours is on,
after the arguments are validated and before the training function looks up what it calls.
"""

import argparse
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Sequence

from megatron_ciera import flags, observe, transformer_engine, validation, yaml_config
from megatron_ciera.errors import ConfigurationError, check_folder, exit_with
from megatron_ciera.feature import Feature, RunInfo
from megatron_ciera.flags import CieraConfig
from megatron_ciera.seam import wrap

DISABLE = "MEGATRON_CIERA_DISABLE"
SUPPORTED = ((0, 19), (0, 20))


def install(
    run_config: yaml_config.RunConfig | None = None,
    complete_argv: Callable | None = None,
    in_front: Sequence[Feature] = (),
) -> None:
    """Adds our flags to Megatron's parser and arranges for features to be attached once they are parsed.

    Once per process: later calls change nothing.

    Args:
        run_config: parsed `--config` file, expanded in front of the command line when Megatron parses it.
        complete_argv: takes and returns a command line; called last (the CPU layer adds what gloo needs).
        in_front: features of the caller's own, called before those that the flags ask for, and without any flag.

    Raises:
        ConfigurationError: Megatron is missing, or its version is not supported.
    """
    check_version()
    from megatron.training import arguments

    wrap(arguments, "add_megatron_arguments", ("parser",), _with_our_flags)
    wrap(
        arguments,
        "parse_args",
        ("extra_args_provider", "ignore_unknown_args"),
        lambda original: _with_config(original, run_config, complete_argv),
    )
    wrap(
        arguments,
        "validate_args",
        ("args", "defaults"),
        lambda original: _with_validation(original, run_config.cluster if run_config else None, in_front),
    )


def check_version() -> None:
    """Raises ConfigurationError unless the Megatron-Core that would be imported is a supported one."""
    try:
        import megatron.core as core
    except ImportError as error:
        raise ConfigurationError(
            f"megatron.core cannot be imported ({error}). Install it: pip install 'megatron-core>=0.19,<0.20'."
        ) from error
    found = getattr(core, "__version__", "unknown")
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        raise ConfigurationError(
            f"megatron-core: found version {found} in {core.__path__[0]}, needs >=0.19,<0.20. "
            "Install megatron-core 0.19.2, or check out core_v0.19.0 of Megatron-LM."
        )


def _with_our_flags(original):
    def add_megatron_arguments(parser):
        parser = flags.add_arguments(original(parser))
        parser.error = lambda message: exit_with(ConfigurationError(message + _hint(message, parser)))
        return parser

    return add_megatron_arguments


def _hint(message: str, parser: argparse.ArgumentParser) -> str:
    """The flags that unknown ones look like. argparse itself prints its usage instead: 700 lines for each rank."""
    unknown = [word.split("=")[0] for word in message.split() if word.startswith("--")]
    unknown = unknown if message.startswith("unrecognized arguments") else []
    known = {option for action in parser._actions for option in action.option_strings}
    close = [found for word in unknown for found in difflib.get_close_matches(word, known, n=1)]
    return (f". Did you mean {', '.join(close)}?" if close else ".") + " --help lists all flags."


def _with_config(original, run_config, complete_argv):
    completed = False

    def parse_args(extra_args_provider=None, ignore_unknown_args=False):
        nonlocal completed
        try:
            if not completed:  # the host parses more than once; sys.argv stays completed
                sys.argv[1:] = _complete(sys.argv[1:], extra_args_provider)
                completed = True
        except ConfigurationError as error:
            exit_with(error)
        return original(extra_args_provider, ignore_unknown_args)

    def _complete(argv, extra_args_provider):
        if run_config is not None:
            argv = yaml_config.expand(run_config, argv, _option_strings(extra_args_provider))
        _check_yaml_cfg(argv, run_config)
        return complete_argv(argv) if complete_argv else argv

    return parse_args


def _option_strings(extra_args_provider) -> set[str]:
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    return {option for action in parser._actions for option in action.option_strings}


def _check_yaml_cfg(argv: list[str], run_config) -> None:
    given = {word.split("=", 1)[0] for word in argv if word.startswith("--")}
    if "--yaml-cfg" not in given:
        return
    ours = _our_option_strings() & given
    if run_config is not None or ours:
        raise ConfigurationError(
            f"--yaml-cfg: found {'--config' if run_config else ', '.join(sorted(ours))} beside it, needs neither: "
            "Megatron's --yaml-cfg replaces the parsed arguments, so flags of megatron-ciera would be lost "
            "without a word. Move the YAML's settings to flags or to --config, or leave out our flags."
        )


def _our_option_strings() -> set[str]:
    parser = flags.add_arguments(argparse.ArgumentParser(add_help=False))
    return {option for action in parser._actions for option in action.option_strings}


def _with_validation(original, cluster, in_front):
    def validate_args(args, defaults=None):
        defaults = {} if defaults is None else defaults
        ours = [] if getattr(args, "yaml_cfg", None) is not None else flags.given_flags(args)
        if _disabled():
            _log(f"{DISABLE}=1: nothing attached{'; ignored: ' if ours else ''}{' '.join(ours)}")
            ours = []
        try:
            if observe.folder() is not None:
                check_folder(observe.VARIABLE, observe.folder())
            if not ours:
                _attach(args, CieraConfig(), in_front)
                return original(args, defaults)
            validation.before_megatron(args)
            transformer_engine.check(args, _has_transformer_engine())
            validated = _megatron_validation(original, args, defaults)
            validation.after_megatron(args)
            _attach(args, flags.config_from_args(args, cluster), in_front)
        except ConfigurationError as error:
            exit_with(error)
        return validated

    return validate_args


def _has_transformer_engine() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE


def _megatron_validation(original, args, defaults):
    try:
        return original(args, defaults)
    except AssertionError as error:
        frame = inspect.trace()[-1]
        where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
        reason = str(error) or (frame.code_context or ["an assertion failed"])[0].strip()
        raise ConfigurationError(f"Megatron refuses these flags ({where}): {reason}") from error


def _features(config: CieraConfig) -> list[Feature]:
    features = []
    if config.moe:
        from megatron_ciera.moe.feature import MoEFeature

        features.append(MoEFeature(config))
    if config.token_shuffle:
        from megatron_ciera.shuffle.feature import ShuffleFeature

        features.append(ShuffleFeature(config))
    if config.ciera:
        from megatron_ciera.param_gather.feature import ParamGatherFeature

        features.append(ParamGatherFeature(config))
    if config.ciera_record is not None:
        from megatron_ciera.record.feature import RecordFeature

        features.append(RecordFeature(config))
    return features


def _disabled() -> bool:
    """Whether the environment switches our flags off. Ends the process on a value that could mean either."""
    value = os.environ.get(DISABLE, "")
    if value not in ("", "0", "1"):
        exit_with(
            ConfigurationError(
                f"{DISABLE}: found {value}, needs 1 (our flags off), 0 or nothing (on). Correct it."
            )
        )
    return value == "1"


def _attach(args, config: CieraConfig, in_front: Sequence[Feature]) -> None:
    """Wraps the functions that `pretrain` looks up, if there is a feature to call or a run to observe."""
    features = [*in_front, *_features(config)]
    folder = observe.folder()
    if not features and folder is None:
        return
    _announce(config)
    from megatron_ciera.training_loop import TrainingLoop

    TrainingLoop(features, _run_info(args), observe.Observer(folder) if folder else None).attach()


def _announce(config: CieraConfig) -> None:
    import megatron.core as core

    _log(f"Megatron-Core {core.__version__} from {core.__path__[0]}")
    for name, value in vars(config).items():
        if value not in (None, False) and value != getattr(CieraConfig, name, None):
            _log(f"{name} = {value}")


def _run_info(args) -> RunInfo:
    return RunInfo(
        load=args.load,
        ckpt_step=args.ckpt_step,
        save=args.save,
        finetune=args.finetune,
        log_interval=args.log_interval,
        train_iters=args.train_iters,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        publish=lambda name, value: setattr(args, name, value),
        log=_log,
    )


def _log(text: str) -> None:
    if _rank() == 0:
        print(f"megatron-ciera: {text}", flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
