"""Who sends which values to whom when experts change slots: pure, and computed alike on every rank."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

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


def fewest_moves(old: np.ndarray, new: np.ndarray, num_ranks: int, ranks_per_node: int) -> np.ndarray:
    """The placement `new` with nodes, ranks and slots renamed so that few experts of `old` move; [E] int64.

    Which experts share a rank, and which ranks share a node, stays as in `new`: rows sent do not change.
    Names are chosen by the largest overlap, nodes first (Hungarian method, scipy).
    """
    local = len(old) // num_ranks
    old_ranks, new_ranks = old.reshape(num_ranks, local), new.reshape(num_ranks, local)
    nodes = num_ranks // ranks_per_node
    renamed = _match(old_ranks.reshape(nodes, -1), new_ranks.reshape(nodes, -1))
    new_ranks = new_ranks.reshape(nodes, ranks_per_node, local)[renamed]
    placed = np.empty_like(old_ranks)
    for node, before in enumerate(old_ranks.reshape(nodes, ranks_per_node, local)):
        after = new_ranks[node][_match(before, new_ranks[node])]
        for rank, (was, wanted) in enumerate(zip(before, after, strict=True)):
            slots = np.where(np.isin(was, wanted), was, -1)
            slots[slots < 0] = np.sort(wanted[~np.isin(wanted, was)])
            placed[node * ranks_per_node + rank] = slots
    return placed.reshape(-1).astype(np.int64)


def _match(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """[G] which group of `new` takes the place of each group of `old`, for the largest overlap."""
    overlap = [[np.isin(after, before).sum() for after in new] for before in old]
    return linear_sum_assignment(np.asarray(overlap), maximize=True)[1]


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
