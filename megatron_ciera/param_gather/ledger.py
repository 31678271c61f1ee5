"""What the gather moved and why some of it went raw.

Bytes are counted by one rule for raw and sent: what a rank *receives* from the others in an all-gather, which is
(ranks - 1) × its own contribution, padding included. Summed over ranks and groups this is the traffic of the job.
Groups of one rank move nothing and are not counted.
"""

from collections import Counter
from collections.abc import Sequence

# Why a gather that could have been compressed was raw. Warm-up and selection are decisions, not fallbacks.
FALLBACKS = ("unsupported", "invalidated", "incompressible")


class Ledger:
    """Counts of this rank since the last `take`."""

    def __init__(self):
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: float) -> None:
        self._counts[name] += amount

    def received(self, name: str, group_size: int, contribution: int) -> None:
        """An all-gather in which each rank contributed `contribution` bytes, counted under `name`."""
        self._counts[name] += (group_size - 1) * contribution

    def take(self, names: Sequence[str]) -> list[float]:
        """The counts of `names`, in order; starts them again from zero."""
        return [self._counts.pop(name, 0) for name in names]
