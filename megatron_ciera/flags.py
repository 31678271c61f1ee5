"""Our argument group, and the frozen configuration made from it once.

Together with validation.py this is all that sees Megatron's `args`; everything else takes a `CieraConfig`.
"""

import argparse
from dataclasses import dataclass

from megatron_ciera.cluster import Cluster

CODECS = ("auto", "exponent-reuse", "delta")
CODERS = ("auto", "ans", "packed")
SHUFFLE_RESIDUALS = ("exchange", "partial-sums")

# Defaults live here and not in the parser: None in `args` means "not given", which is how a flag that only
# makes sense beside another one is told from its default.
_DEFAULTS = {
    "ciera_codec": "auto",
    "ciera_coder": "auto",
    "ciera_block_size": 512,
    "ciera_warmup_iters": 30,
    "ciera_cache_budget_mb": None,
    "ciera_verify_interval": 0,
    "placement_fit_iteration": 1000,
    "placement_refit_interval": 1000,
    "placement_fit_tokens": 4096,
    "placement_load_tolerance": 0.05,
    "token_shuffle_residual": "exchange",
}


@dataclass(frozen=True)
class CieraConfig:
    """What this run was asked to do, validated. Sizes in values, MB or iterations as the flags say."""

    ciera: bool = False
    ciera_codec: str = "auto"
    ciera_coder: str = "auto"
    ciera_block_size: int = 512
    ciera_warmup_iters: int = 30
    ciera_cache_budget_mb: float | None = None
    ciera_selection: bool = True
    ciera_overlap: bool = True
    ciera_verify_interval: int = 0
    ciera_record: str | None = None

    correlated_placement: bool = False
    placement_file: str | None = None
    placement_fit_iteration: int = 1000
    placement_refit_interval: int = 1000
    placement_fit_tokens: int = 4096
    placement_load_tolerance: float = 0.05

    dedup_dispatch: bool = False
    token_shuffle: bool = False
    token_shuffle_residual: str = "exchange"

    cluster: Cluster | None = None

    @property
    def moe(self) -> bool:
        """Whether MoE layers are touched."""
        return self.correlated_placement or self.dedup_dispatch or self.token_shuffle


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our argument group to Megatron's parser and returns the parser."""
    group = parser.add_argument_group(title="megatron-ciera")
    flag = group.add_argument
    flag("--ciera", action="store_true", help="compressed, bit-exact parameter gather")
    flag("--ciera-codec", choices=CODECS, default=None, help="default: auto")
    flag("--ciera-coder", choices=CODERS, default=None, help="entropy stage; default: auto")
    flag("--ciera-block-size", type=int, default=None, help="values per exponent block; default: 512")
    flag("--ciera-warmup-iters", type=int, default=None, help="raw gathers at start; default: 30")
    flag("--ciera-cache-budget-mb", type=float, default=None, help="cache memory per GPU; default: no cap")
    flag("--ciera-no-selection", action="store_true", help="compress every eligible segment")
    flag("--ciera-no-overlap", action="store_true", help="run the codec on the compute stream")
    flag("--ciera-verify-interval", type=int, default=None, help="gather raw as well and compare; default: 0")
    flag("--ciera-record", metavar="PATH", default=None, help="write a trace for scripts/simulate.py")

    flag("--correlated-placement", action="store_true", help="correlated expert placement")
    flag("--placement-file", metavar="PATH", default=None, help="use this placement; fit and refit nothing")
    flag("--placement-fit-iteration", type=int, default=None, help="fit in the run; default: 1000")
    flag("--placement-refit-interval", type=int, default=None, help="0: never; default: 1000")
    flag("--placement-fit-tokens", type=int, default=None, help="default: 4096")
    flag("--placement-load-tolerance", type=float, default=None, help="default: 0.05")

    flag(
        "--dedup-dispatch",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="one row per (token, rank); default: on with --correlated-placement and the alltoall dispatcher",
    )
    flag("--token-shuffle", action="store_true", help="move tokens to their next experts' rank")
    flag(
        "--token-shuffle-residual",
        choices=SHUFFLE_RESIDUALS,
        default=None,
        help="exchange: exact, rows travel under attention; partial-sums: no extra traffic, other rounding; "
        "default: exchange",
    )
    return parser


def given_flags(args: argparse.Namespace) -> list[str]:
    """Our flags that the user gave, as spelled on the command line."""
    probe = add_arguments(argparse.ArgumentParser(add_help=False))
    spelled = []
    for action in probe._actions:
        value = getattr(args, action.dest, action.default)
        if value != action.default:
            negated = value is False and len(action.option_strings) > 1
            spelled.append(action.option_strings[1 if negated else 0])
    return spelled


def config_from_args(args: argparse.Namespace, cluster: Cluster | None = None) -> CieraConfig:
    """The frozen configuration of parsed and validated `args` (see validation.check)."""
    values = {name: getattr(args, name, None) for name in _DEFAULTS}
    values = {name: _DEFAULTS[name] if value is None else value for name, value in values.items()}
    dedup = getattr(args, "dedup_dispatch", None)
    if dedup is None:
        dedup = args.correlated_placement and args.moe_token_dispatcher_type == "alltoall"
    return CieraConfig(
        ciera=args.ciera,
        ciera_selection=not args.ciera_no_selection,
        ciera_overlap=not args.ciera_no_overlap,
        ciera_record=args.ciera_record,
        correlated_placement=args.correlated_placement,
        placement_file=args.placement_file,
        dedup_dispatch=dedup,
        token_shuffle=args.token_shuffle,
        cluster=cluster,
        **values,
    )
