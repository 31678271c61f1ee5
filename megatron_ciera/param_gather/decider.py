"""Decides, and decides again, which segments of a group are compressed. The same on every rank of the group."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_ciera.param_gather.bucket import GatherBucket
from megatron_ciera.param_gather.codec import Codec
from megatron_ciera.param_gather.probe import Probe
from megatron_ciera.param_gather.selection import (
    ClassStats,
    Costs,
    Decision,
    choose,
    drifted,
    format_table,
    gains,
    rows,
)

PROBE_INTERVAL = 32  # steps between two looks at the change rates, after the warm-up
MARGIN = 0.05  # share of the raw gathers' time that coding must save: predictions are no better than that
DRIFT = 0.1  # share by which a class's expected payload must move before anything is decided anew
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Policy:
    """What the flags ask for. `budget`: bytes of codec state on this rank for this group, or None."""

    codecs: tuple[str, ...]
    select: bool
    budget: int | None
    warmup_steps: int
    block_size: int


class Decider:
    """Owns the probe and the latest decision of one group.

    Args:
        name: for messages.
        buckets: of the group, all of one dtype.
        costs: measured times, or None to select by bytes.
        log: prints a line on rank 0.
    """

    def __init__(
        self,
        name: str,
        buckets: Sequence[GatherBucket],
        codecs: Mapping[str, Codec],
        policy: Policy,
        costs: Costs | None,
        log: Callable[[str], None],
    ):
        self._name, self._policy, self._costs, self._log = name, policy, costs, log
        self._codecs = {codec: codecs[codec] for codec in policy.codecs}
        self._pieces = [piece for bucket in buckets for piece in bucket.pieces]
        self._dtype = buckets[0].values.dtype
        kinds = dict.fromkeys(s.kind for piece in self._pieces for part in piece.segments for s in part)
        own = [(o.segment.kind, o.words) for bucket in buckets for o in bucket.own]
        self.probe = Probe(own, sorted(kinds), self._codecs, self._dtype, policy.block_size)
        self._decided_on: Mapping[str, ClassStats] = {}
        self.decision: Decision | None = None

    @property
    def num_counts(self) -> int:
        """int64 values that this adds to the size exchange."""
        return self.probe.num_counts + 1

    def before_step(self, step: int) -> None:
        """To be called before the optimizer writes the values of `step` (from 1)."""
        if step <= self._policy.warmup_steps or step % PROBE_INTERVAL == 0:
            self.probe.remember()

    @property
    def due(self) -> bool:
        """Whether the latest step is to be measured, and has not been."""
        return self.probe.ready

    def write(self, out: torch.Tensor) -> None:
        """This rank's counts, int64 `[num_counts]` on the device."""
        self.probe.measure(out[:-1])
        # Not `out[-1] = …`, which waits for the device.
        out[-1:].fill_(_NO_LIMIT if self._policy.budget is None else self._policy.budget)

    def take(self, counts: torch.Tensor, warming_up: bool) -> bool:
        """Takes in all ranks' counts, int64 `[ranks, num_counts]` on the host; True if there is a new decision."""
        stats = self.probe.stats(counts[:, :-1])
        names = list(self._codecs)
        if self.decision and not warming_up and not drifted(self._decided_on, stats, names, DRIFT):
            return False
        budgets = [None if b == _NO_LIMIT else b for b in counts[:, -1].tolist()]
        choices, measured = self._choose(stats, budgets)
        before, self._decided_on = self.decision, stats
        itemsize = torch.empty(0, dtype=self._dtype).element_size()
        self.decision = Decision(
            choices, rows(choices, measured, stats, itemsize), in_seconds=self._costs is not None
        )
        return before is None or before.choices != choices

    def announce(self) -> None:
        """Logs the decision table."""
        for line in format_table(self._name, self.decision):
            self._log(line)

    def _choose(self, stats, budgets):
        itemsize = torch.empty(0, dtype=self._dtype).element_size()
        measured = gains(self._pieces, stats, tuple(self._codecs), itemsize, self._costs)
        state_bytes = {
            (name, segment.length): codec.state_bytes(segment.length)
            for name, codec in self._codecs.items()
            for segment in measured
        }
        overhead = 0.0
        if self._costs:
            raw = sum(self._costs.comm(piece.length * itemsize) for piece in self._pieces)
            overhead = self._costs.exchange + MARGIN * raw
        return (
            choose(self._pieces, measured, state_bytes, budgets, self._policy.select, overhead),
            measured,
        )
