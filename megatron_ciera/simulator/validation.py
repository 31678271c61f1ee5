"""Measured step times against those that recorded traces predict for the same runs on other links."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from megatron_ciera.cluster import Cluster, Link
from megatron_ciera.simulator.features import parse_features, rates_at
from megatron_ciera.simulator.hardware import hardware
from megatron_ciera.simulator.replay import RECORDED, Target, replay
from megatron_ciera.simulator.trace import Trace


@dataclass(frozen=True)
class Measured:
    """One run. link, variant: where and what. seconds: of its iterations, warm-up left out. gather_ratio: sent over
    raw bytes, None without --ciera. rows_removed: share of dispatch rows, None without --dedup-dispatch."""

    link: str
    variant: str
    seconds: tuple[float, ...]
    gather_ratio: float | None = None
    rows_removed: float | None = None

    @property
    def middle(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True)
class Prediction:
    """A trace of `recorded_on` played for `run`. error: predicted over measured, minus one."""

    run: Measured
    recorded_on: str
    seconds: float

    @property
    def error(self) -> float:
        return self.seconds / self.run.middle - 1


def on_link(cluster: Cluster, measured: Mapping[str, float]) -> Cluster:
    """`cluster` with what scripts/measure_links.py found between its nodes."""
    return replace(cluster, inter_node=Link(**measured))


def predict(
    run: Measured,
    recorded: Measured,
    trace: Trace,
    cluster: Cluster,
    codec_gb_s: tuple[float, float] | None = None,
) -> Prediction:
    """Plays `trace`, which the stock run `recorded` wrote, with the features of `run` on its links, `cluster`.

    What a run of the feature itself must tell, the compression ratio and the rows removed, is taken from `run`. What
    `recorded` took beside the iteration that the trace shows (logging, data) is added as it was.
    codec_gb_s: raw-equivalent (encode, decode) of scripts/bench_codec.py; None: the built-in speeds.
    """
    gpu, rates = hardware(cluster).with_codec(*codec_gb_s or (None, None)), rates_at(1e-4)
    if run.gather_ratio is not None:
        rates = rates.with_ratio(run.gather_ratio)
    features = RECORDED if run.variant == "stock" else parse_features(_WORDS[run.variant])
    size = trace.header["world"]
    target = Target(cluster, gpu, features, rates, size, run.rows_removed)
    beside = max(0.0, recorded.middle - trace.typical().seconds)
    return Prediction(run, recorded.link, replay(trace, target).seconds + beside)


def table(predictions: list[Prediction]) -> str:
    """Markdown, one line a prediction, the largest error of each kind last."""
    lines = [
        "| run | link | measured ms (spread) | trace of | predicted ms | error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in predictions:
        run = each.run
        spread = (max(run.seconds) - min(run.seconds)) / run.middle
        lines.append(
            f"| {run.variant} | {run.link} | {1e3 * run.middle:.1f} ({spread:.1%}) | {each.recorded_on} | "
            f"{1e3 * each.seconds:.1f} | {each.error:+.1%} |"
        )
    own = [abs(each.error) for each in predictions if each.recorded_on == each.run.link]
    other = [abs(each.error) for each in predictions if each.recorded_on != each.run.link]
    for name, errors in (("the same link", own), ("another link", other)):
        if errors:
            within = sum(error <= 0.05 for error in errors)
            lines.append(
                f"\nTraces of {name}: {within} of {len(errors)} within 5 %, largest error {max(errors):.1%}."
            )
    return "\n".join(lines)


# A run with --dedup-dispatch counts its rows; `placement` is what makes the replay use that number.
_WORDS = {"ciera": "ciera", "dedup": "placement"}
