"""Event-level simulation of operations on streams that share links.

An operation first takes a fixed time (computation, or the latency of a collective), then moves bytes over links.
Operations of one stream run one after another in the order given. Transfers on one link share its bandwidth
equally while they are there: that is how two collectives contend for a NIC.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Op:
    """One operation.

    key: its name, unique in a simulation. kind: what it counts as in the split of time. stream: where it queues.
    seconds: fixed part. traffic: bytes over each link after that. after: keys that must have ended before it starts,
    also of operations that stand later in the list.
    """

    key: str
    kind: str
    stream: str
    seconds: float = 0.0
    traffic: Mapping[str, float] = field(default_factory=dict)
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Span:
    """When an operation ran: seconds from the start."""

    op: Op
    start: float
    end: float


def simulate(ops: Sequence[Op], links: Mapping[str, float]) -> list[Span]:
    """Runs `ops` and returns their spans in the order given.

    Args:
        ops: in issue order of each stream.
        links: bandwidth of every link in bytes/s.

    Raises:
        ValueError: a key is given twice or not at all, a link is unknown, or operations wait for each other.
    """
    return _Simulation(ops, links).run()


class _Simulation:
    def __init__(self, ops, links):
        self.ops, self.links = ops, links
        index = {op.key: i for i, op in enumerate(ops)}
        if len(index) < len(ops):
            raise ValueError("simulator: two operations have the same key; keys must be unique")
        self.waits = [0] * len(ops)
        self.releases: list[list[int]] = [[] for _ in ops]
        last_on_stream: dict[str, int] = {}
        for i, op in enumerate(ops):
            unknown = [link for link in op.traffic if link not in links]
            missing = [key for key in op.after if key not in index]
            if unknown or missing:
                raise ValueError(
                    f"simulator: {op.key} names what is not there: {', '.join(unknown + missing)}"
                )
            before = {index[key] for key in op.after}
            if op.stream in last_on_stream:
                before.add(last_on_stream[op.stream])
            last_on_stream[op.stream] = i
            self.waits[i] = len(before)
            for j in before:
                self.releases[j].append(i)
        self.now = 0.0
        self.start: list[float] = [0.0] * len(ops)
        self.end: list[float | None] = [None] * len(ops)
        self.fixed: list[tuple[float, int]] = []  # heap of (end of the fixed part, op)
        # Bytes left of each transfer, by link.
        self.left: dict[str, dict[int, float]] = {link: {} for link in links}
        self.transfers = [0] * len(ops)

    def run(self) -> list[Span]:
        for i, waits in enumerate(self.waits):
            if waits == 0:
                self._begin(i)
        while self.fixed or any(self.left.values()):
            self._advance(self._next_time())
        stuck = [op.key for op, end in zip(self.ops, self.end, strict=True) if end is None]
        if stuck:
            raise ValueError(f"simulator: operations wait for each other: {', '.join(stuck[:5])}")
        return [Span(*each) for each in zip(self.ops, self.start, self.end, strict=True)]

    def _begin(self, i: int) -> None:
        self.start[i] = self.now
        heapq.heappush(self.fixed, (self.now + self.ops[i].seconds, i))

    def _next_time(self) -> float:
        times = [self.fixed[0][0]] if self.fixed else []
        for link, left in self.left.items():
            if left:
                times.append(self.now + min(left.values()) * len(left) / self.links[link])
        return min(times)

    def _advance(self, time: float) -> None:
        finished = []
        for link, left in self.left.items():
            if not left:
                continue
            # A transfer whose own end is this moment is done, whatever rounding leaves of it.
            share = self.links[link] / len(left)
            done = [i for i, amount in left.items() if self.now + amount / share <= time]
            moved = (time - self.now) * share
            for i in left:
                left[i] = max(0.0, left[i] - moved)
            for i in done:
                del left[i]
                finished.append(i)
        self.now = time
        for i in finished:
            self.transfers[i] -= 1
            if self.transfers[i] == 0:
                self._finish(i)
        while self.fixed and self.fixed[0][0] <= time:
            _, i = heapq.heappop(self.fixed)
            traffic = {link: amount for link, amount in self.ops[i].traffic.items() if amount > 0}
            self.transfers[i] = len(traffic)
            for link, amount in traffic.items():
                self.left[link][i] = amount
            if not traffic:
                self._finish(i)

    def _finish(self, i: int) -> None:
        self.end[i] = self.now
        for j in self.releases[i]:
            self.waits[j] -= 1
            if self.waits[j] == 0:
                self._begin(j)
