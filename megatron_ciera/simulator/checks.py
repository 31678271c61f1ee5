"""What every simulated timeline must obey, whatever was simulated. Run on each one before it is reported."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from megatron_ciera.simulator.engine import Span

# Sums of many float64 times; a violation is a mistake of the engine and far larger.
_ROUNDING = 1e-9


def check(spans: Sequence[Span], links: Mapping[str, float]) -> None:
    """Raises ValueError naming the operation: a span shorter than its bytes and latency allow, a stream that overlaps
    itself, an operation that ran before what it waits for, or a link that carried more than its bandwidth."""
    _check_durations(spans, links)
    _check_streams(spans)
    _check_order(spans)
    _check_links(spans, links)


def _slack(time: float) -> float:
    return _ROUNDING * max(time, 1e-6)


def _check_durations(spans, links) -> None:
    for span in spans:
        slowest = max((amount / links[link] for link, amount in span.op.traffic.items()), default=0.0)
        least = span.op.seconds + slowest
        if span.end - span.start < least - _slack(span.end):
            raise ValueError(
                f"simulator: {span.op.key} took {span.end - span.start:.3e} s, but its work needs {least:.3e} s"
            )


def _check_streams(spans) -> None:
    last: dict[str, Span] = {}
    for span in spans:
        before = last.get(span.op.stream)
        if before is not None and span.start < before.end - _slack(before.end):
            raise ValueError(
                f"simulator: stream {span.op.stream} overlaps itself: {before.op.key}, {span.op.key}"
            )
        last[span.op.stream] = span


def _check_order(spans) -> None:
    end = {span.op.key: span.end for span in spans}
    for span in spans:
        for key in span.op.after:
            if span.start < end[key] - _slack(end[key]):
                raise ValueError(f"simulator: {span.op.key} started before {key} ended")


def _check_links(spans, links) -> None:
    """In no window between two ends of a busy period does a link carry more than bandwidth × time."""
    users = defaultdict(list)
    for span in spans:
        for link, amount in span.op.traffic.items():
            users[link].append((span.start, span.end, amount))
    for link, transfers in users.items():
        transfers.sort()
        start, end, carried = transfers[0][0], transfers[0][1], 0.0
        for begin, finish, amount in transfers:
            if begin > end:
                _check_busy(link, start, end, carried, links[link])
                start, end, carried = begin, finish, 0.0
            end, carried = max(end, finish), carried + amount
        _check_busy(link, start, end, carried, links[link])


def _check_busy(link, start, end, carried, bandwidth) -> None:
    if carried / bandwidth > (end - start) + _slack(end):
        raise ValueError(
            f"simulator: link {link} carried {carried:.4g} bytes in {end - start:.3e} s, more than "
            f"{bandwidth:.4g} bytes/s allow"
        )
