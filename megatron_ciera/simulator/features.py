"""What each feature changes: bits a value of the parameter gather, rows that leave a GPU in dispatch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_ciera.errors import refuse
from placement.rows import expected_rows_per_token

WORDS = ("ciera", "exponent-reuse", "no-selection", "no-overlap", "dedup", "placement", "shuffle")
CLASSES = ("dense", "expert")


@dataclass(frozen=True)
class Features:
    """One variant of a run. codec: None, "delta" or "exponent-reuse"."""

    name: str
    codec: str | None = None
    selection: bool = True
    overlap: bool = True
    dedup: bool = False
    placement: bool = False
    shuffle: bool = False


def parse_features(text: str) -> Features:
    """`stock`, or words joined by `+`: ciera, exponent-reuse, no-selection, no-overlap, dedup, placement, shuffle.

    Raises:
        ConfigurationError: another word.
    """
    words = [] if text == "stock" else text.split("+")
    for word in words:
        if word not in WORDS:
            raise refuse("--features", word, f"stock or some of {', '.join(WORDS)}", "Join them with +.")
    codec = "exponent-reuse" if "exponent-reuse" in words else "delta" if "ciera" in words else None
    return Features(
        name=text,
        codec=codec,
        selection="no-selection" not in words,
        overlap="no-overlap" not in words,
        dedup=bool({"dedup", "placement", "shuffle"} & set(words)),
        placement=bool({"placement", "shuffle"} & set(words)),
        shuffle="shuffle" in words,
    )


# Measured on training from scratch, expert and attention weights: learning rate, exponent change rate, bits a value
# of the difference of integer codes (order-0 entropy).
_RATE = (6.0e-5, 7.8e-5, 1.2e-4, 2.0e-4, 3.9e-4)
_EXPONENTS_CHANGED = (0.0043, 0.0054, 0.0096, 0.015, 0.033)
_DELTA_BITS = (1.31, 1.52, 2.12, 2.72, 3.88)
_EXPONENT_ENTROPY = 2.65
# Escapes and chunk headers of the delta codec over the entropy; measured 3.85 bits for 3.13 to 3.88 of entropy.
_DELTA_OVERHEAD = 0.05


@dataclass(frozen=True)
class ChangeRates:
    """How much of the weights a step changes. `delta_bits`, `block_change_rate`: by class, dense or expert.

    ratio: bytes sent over raw bytes, of whatever codec, if they were measured.
    """

    delta_bits: Mapping[str, float]
    block_change_rate: Mapping[str, float]
    block_size: int = 512
    source: str = ""
    ratio: float | None = None

    def bits(self, codec: str, kind: str) -> float:
        """Bits on the wire for one bf16 value.

        exponent-reuse: sign and mantissa, one bitmap bit a block, coded exponents of changed blocks.
        """
        if self.ratio is not None:
            return 16 * self.ratio
        if codec == "delta":
            return self.delta_bits[kind]
        return 8 + 1 / self.block_size + self.block_change_rate[kind] * _EXPONENT_ENTROPY

    def with_ratio(self, ratio: float) -> "ChangeRates":
        """With gathers that send `ratio` of the raw bytes, as a run reports it."""
        return replace(self, ratio=ratio, source=f"{ratio:g} of the raw bytes, as given")


def rates_at(learning_rate: float, block_size: int = 512) -> ChangeRates:
    """Interpolated (in logarithms) from what was measured; outside it the nearest measured rate.

    The block rate takes exponents as changing independently: 1 - (1 - c)^B.
    """
    at = np.log(learning_rate), np.log(_RATE)
    changed = math.exp(np.interp(*at, np.log(_EXPONENTS_CHANGED)))
    bits = math.exp(np.interp(*at, np.log(_DELTA_BITS))) + _DELTA_OVERHEAD
    blocks = 1 - (1 - changed) ** block_size
    return ChangeRates(
        dict.fromkeys(CLASSES, bits),
        dict.fromkeys(CLASSES, blocks),
        block_size,
        f"measured change rates, interpolated at learning rate {learning_rate:g}",
    )


def rates_from_stability(report: Mapping, source: str, block_size: int | None = None) -> ChangeRates:
    """From the JSON of scripts/measure_stability.py: experts, and everything else by its attention class.

    block_size: one that was measured; None: the largest of them.

    Raises:
        ConfigurationError: `block_size` was not measured.
    """
    sizes = report["total"]["block_change_rate"]
    size = max(sizes, key=int) if block_size is None else str(block_size)
    if size not in sizes:
        raise refuse(
            "--block-size",
            size,
            f"one that {source} measured: {', '.join(sizes)}",
            "Or measure it: measure_stability.py --block-size.",
        )
    delta, blocks = {}, {}
    for kind, name in (("expert", "expert"), ("dense", "attention")):
        measured = report["classes"].get(name, report["total"])
        delta[kind] = measured["bits_per_value"]["delta"]
        blocks[kind] = measured["block_change_rate"][size]
    return ChangeRates(delta, blocks, int(size), source)


@dataclass(frozen=True)
class Routing:
    """Rows of dispatch: `rows` per token and destination (stock: topk), `local` of them on the token's own rank."""

    rows: float
    local: float
    source: str = ""

    @property
    def remote(self) -> float:
        return self.rows - self.local


@dataclass(frozen=True)
class RoutingAssumption:
    """What placement and shuffling reach, if it was not measured.

    placement_gain: share of the rows that contiguous deduplication leaves which placement removes, by EP size.
    locality: share of assignments on the token's rank after shuffling, by EP size. Between sizes: linear in log2.
    """

    placement_gain: Mapping[int, float] = field(default_factory=dict)
    locality: Mapping[int, float] = field(default_factory=dict)

    def at(self, table: Mapping[int, float], ranks: int) -> float:
        sizes = sorted(table)
        return float(np.interp(np.log2(ranks), np.log2(sizes), [table[size] for size in sizes]))


# From the expert-coupling paper: rows removed on held-out tokens, 128 experts. top-6: 58 % at EP 8, 35.1 % at EP 32;
# top-2: 26.5 % at EP 8, and its smallest reduction, 1.12 times, taken to be EP 64. EP 64 of top-6 is ours.
_PAPER = {
    2: RoutingAssumption({8: 0.219, 64: 0.10}, {8: 0.59, 16: 0.53}),
    6: RoutingAssumption({8: 0.436, 32: 0.311, 64: 0.249}, {8: 0.57, 16: 0.46}),
}


def check_shuffle(features: Features, tensor: int, expert: int) -> None:
    """Raises ConfigurationError if `features` shuffle tokens in a layout where that cannot be."""
    if features.shuffle and tensor != expert:
        raise refuse(
            "--features",
            f"{features.name} with TP {tensor} and EP {expert}",
            "the two to be equal for shuffle",
            "Leave shuffle out.",
        )


def routing(
    num_experts: int, topk: int, ranks: int, features: Features, rows_removed: float | None = None
) -> Routing:
    """Rows per token for this variant; `rows_removed` overrides the assumed share for placement.

    Raises:
        ConfigurationError: `rows_removed` is no share.
    """
    if rows_removed is not None and not 0 <= rows_removed < 1:
        raise refuse("--rows-removed", rows_removed, "a share from 0 to below 1", "45 % is 0.45.")
    if ranks == 1:
        return Routing(topk, topk, "one rank")
    if not features.dedup:
        return Routing(topk, topk / ranks, "one row an assignment")
    contiguous = expected_rows_per_token(num_experts, topk, ranks)
    if not features.placement:
        return Routing(contiguous, contiguous / ranks, "uniform routing, contiguous experts")
    nearest = 2 if topk <= 2 else 6
    assumed = _PAPER[nearest]
    paper = f"as in the expert-coupling paper for top-{nearest}"
    if rows_removed is None:
        rows = contiguous * (1 - assumed.at(assumed.placement_gain, ranks))
        source = f"rows removed {paper}"
    else:
        rows, source = topk * (1 - rows_removed), "rows removed as given"
    rows = max(rows, 1.0)
    if not features.shuffle:
        return Routing(rows, rows / ranks, source)
    # A token's own rank serves `locality` of its assignments. If rows carry equally many, the share of tokens whose
    # own rank is among their destinations is locality × rows, and never more than all of them.
    locality = assumed.at(assumed.locality, ranks)
    return Routing(rows, min(1.0, locality * rows), f"{source}, locality {paper}")
