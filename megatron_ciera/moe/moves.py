"""Who sends which values to whom when experts change slots: pure, and computed alike on every rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

Range = tuple[int, int]


@dataclass(frozen=True)
class Move:
    """Expert in global slot `source` goes to global slot `target`."""

    source: int
    target: int


@dataclass(frozen=True)
class Transfer:
    """Values [start, stop) of one expert's flat parameter, between two expert-data ranks."""

    move: Move
    sender: int
    receiver: int
    start: int
    stop: int


def moves(old: np.ndarray, new: np.ndarray) -> list[Move]:
    """Changes between two maps slot -> expert ([E] each), by target slot; slots that keep theirs are left out."""
    slot_of = np.empty_like(old)
    slot_of[old] = np.arange(len(old))
    return [
        Move(int(slot_of[expert]), slot) for slot, expert in enumerate(new) if int(slot_of[expert]) != slot
    ]


def transfers(move: Move, held: Mapping[tuple[int, int], Range | None], data_size: int) -> Iterator[Transfer]:
    """Transfers that give every receiver exactly its range, preferring the sender with its own data rank.

    Args:
        held: (local slot of source or target expert, data rank) -> range held there, under the keys
            ("source", r) and ("target", r); None where nothing is held. Items behind the first two are ignored.

    Raises:
        ValueError: the senders together do not hold what a receiver needs.
    """
    for receiver in range(data_size):
        needed = [held["target", receiver][:2]] if held["target", receiver] else []
        for sender in [receiver, *(r for r in range(data_size) if r != receiver)]:
            span = held["source", sender]
            if not span or not needed:
                continue
            rest = []
            for start, stop in needed:
                low, high = max(start, span[0]), min(stop, span[1])
                if low >= high:
                    rest.append((start, stop))
                    continue
                yield Transfer(move, sender, receiver, low, high)
                rest += [part for part in ((start, low), (high, stop)) if part[0] < part[1]]
            needed = rest
        if needed:
            raise ValueError(
                f"expert migration: no rank holds the values {needed} of slot {move.source} that slot "
                f"{move.target} needs on expert-data rank {receiver}"
            )
