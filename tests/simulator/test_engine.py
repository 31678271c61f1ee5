"""The engine: hand-computed sharing of links, order, and mistakes that the checks must find."""

from dataclasses import replace

import pytest

from megatron_ciera.simulator.checks import check
from megatron_ciera.simulator.engine import Op, Span, simulate

LINKS = {"nic": 256.0, "port": 1024.0}


def ends(ops):
    spans = simulate(ops, LINKS)
    check(spans, LINKS)
    return {span.op.key: (span.start, span.end) for span in spans}


def test_two_transfers_share_a_link_and_the_last_part_goes_alone():
    ops = [Op("a", "x", "1", 0, {"nic": 336}), Op("b", "x", "2", 0, {"nic": 256})]
    # 128 bytes/s each until b ends at 2.0; 80 bytes of a are left for 256 bytes/s.
    assert ends(ops) == {"a": (0, 2.3125), "b": (0, 2.0)}


def test_a_later_transfer_slows_the_earlier_one():
    ops = [Op("a", "x", "1", 0, {"nic": 512}), Op("b", "x", "2", 1.0, {"nic": 128})]
    # a moves 256 in the first second, then both get 128 bytes/s: b ends at 2.0, a has 128 left.
    assert ends(ops) == {"a": (0, 2.5), "b": (0, 2.0)}


def test_the_slowest_link_decides_and_links_do_not_disturb_each_other():
    ops = [Op("a", "x", "1", 0.5, {"nic": 256, "port": 256}), Op("b", "x", "2", 0, {"port": 512})]
    assert ends(ops) == {"a": (0, 1.5), "b": (0, 0.5)}


def test_streams_queue_and_keys_that_come_later_are_waited_for():
    ops = [Op("a", "x", "1", 1.0, after=("c",)), Op("b", "x", "1", 1.0), Op("c", "x", "2", 0.25)]
    assert ends(ops) == {"a": (0.25, 1.25), "b": (1.25, 2.25), "c": (0, 0.25)}


def test_empty_operation_takes_no_time():
    assert ends([Op("a", "x", "1"), Op("b", "x", "2", 0, {"nic": 0.0}, ("a",))])["b"] == (0, 0)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (
            [Op("a", "x", "1", 1, after=("b",)), Op("b", "x", "2", 1, after=("a",))],
            "wait for each other: a, b",
        ),
        ([Op("a", "x", "1"), Op("a", "x", "2")], "same key"),
        ([Op("a", "x", "1", 0, {"wire": 1.0})], "a names what is not there: wire"),
        ([Op("a", "x", "1", after=("b",))], "a names what is not there: b"),
    ],
)
def test_impossible_inputs_are_refused(ops, message):
    with pytest.raises(ValueError, match=message):
        simulate(ops, LINKS)


def broken(change):
    ops = [
        Op("a", "x", "1", 0.5, {"nic": 256}),
        Op("b", "x", "1", 0.5, after=("c",)),
        Op("c", "x", "2", 0, {"nic": 256}),
    ]
    spans = {span.op.key: span for span in simulate(ops, LINKS)}
    spans.update({key: replace(spans[key], **times) for key, times in change.items()})
    return list(spans.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {"end": 1.25}}, "a took 1.250e"),
        ({"b": {"start": 1.0, "end": 1.5}}, "stream 1 overlaps itself: a, b"),
        ({"b": {"start": 1.9, "end": 2.4}, "a": {"end": 1.8}, "c": {"end": 2.0}}, "b started before c ended"),
        ({"a": {"end": 1.75}, "b": {"start": 1.75, "end": 2.25}}, "link nic carried 512 bytes in 1.750e"),
    ],
)
def test_checks_find_what_cannot_be(change, message):
    check(broken({}), LINKS)
    with pytest.raises(ValueError, match=message):
        check(broken(change), LINKS)


def test_every_link_ends_with_all_bytes_moved():
    ops = [Op(f"{i}", "x", f"{i % 7}", 0.01 * (i % 3), {"nic": 7.0 * i % 31}) for i in range(200)]
    spans = simulate(ops, LINKS)
    check(spans, LINKS)
    moved = sum(op.traffic["nic"] for op in ops)
    assert max(span.end for span in spans) >= moved / LINKS["nic"]
    assert all(isinstance(span, Span) and span.end >= span.start for span in spans)
