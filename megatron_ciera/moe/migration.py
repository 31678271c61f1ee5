"""Moving experts between slots: weights, fp32 masters and moments, bit for bit, one layer at a time.

Between steps, with parameters gathered and no collective in flight. A layer is packed, exchanged and only then
written, after all ranks of its pipeline stage agree; staging is one layer's expert state at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_ciera.moe.groups import ExpertGroup
from megatron_ciera.moe.moves import Move, Transfer, moves, transfers
from megatron_ciera.moe.optimizer_state import OptimizerState
from megatron_ciera.moe.sites import Family, Site, families

_WEIGHT = "weight"


class MigrationError(RuntimeError):
    """Experts could not be moved; raised on every rank. Layers moved before the failing one keep their move."""


@dataclass(frozen=True, eq=False)
class _Span:
    """Flat values [start, stop) of one expert's parameter, by state name, as writable views."""

    start: int
    stop: int
    states: dict[str, torch.Tensor]

    @property
    def names(self) -> list[tuple[str, str]]:
        return sorted((name, str(value.dtype)) for name, value in self.states.items())


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer's expert state on this rank, and what every other rank of the group holds.

    weights, optimizer: [family][slot]. held: [member][family][slot] -> (start, stop, names) of optimizer state.
    """

    families: list[Family]
    weights: list[list[_Span]]
    optimizer: list[list[_Span | None]]
    held: list[list[list[tuple | None]]]


def migrate(
    site: Site,
    mapping: torch.Tensor,
    new: np.ndarray,
    optimizer: OptimizerState,
    group: ExpertGroup,
) -> int:
    """Moves one layer's experts from the placement in `mapping` to `new` and updates `mapping` in place.

    Args:
        mapping: [E] int64, the layer's physical_to_logical_map, on any device.
        new: [E] int64 permutation, equal on all ranks.

    Returns the bytes that this rank received. Collective over `group`, then its stage; staging allocates this
    rank's outgoing and incoming bytes. Host synchronisations: several.

    Raises:
        MigrationError: on every rank of the stage, if any of them failed before writing; nothing was written.
    """
    pending = moves(mapping.cpu().numpy(), new)
    if not pending:
        return 0
    failure, packed = None, None
    try:
        layer = _describe(site, optimizer)
    except Exception as error:
        layer, failure = None, error
    held, steps = _gather_held(layer, optimizer, group)
    _agree(site, failure or _differing_steps(steps), group)
    layer = _Layer(layer.families, layer.weights, layer.optimizer, held)
    try:
        packed = _pack(layer, pending, site.num_local_experts, group)
    except Exception as error:
        failure = error
    _agree(site, failure, group)
    send, send_sizes, receive, receive_sizes, incoming = packed
    dist.all_to_all_single(receive, send, receive_sizes, send_sizes, group=group.group)
    _agree(site, None, group)
    _write(receive, incoming)
    mapping.copy_(torch.from_numpy(np.asarray(new, dtype=np.int64)))
    return len(receive)


def _describe(site: Site, optimizer: OptimizerState) -> _Layer:
    found = families(site)
    slots = range(site.num_local_experts)
    weights = [[_Span(0, family.numel, {_WEIGHT: family.value(slot)}) for slot in slots] for family in found]
    states = [[_optimizer_span(family, slot, optimizer) for slot in slots] for family in found]
    return _Layer(found, weights, states, [])


def _optimizer_span(family: Family, slot: int, optimizer: OptimizerState) -> _Span | None:
    parameter, first = family.owners[slot]
    piece = optimizer.piece(parameter)
    if piece is None:
        return None
    start, stop = max(piece.start, first), min(piece.stop, first + family.numel)
    if start >= stop or not piece.states:
        return None
    states = {name: value[start - piece.start : stop - piece.start] for name, value in piece.states.items()}
    return _Span(start - first, stop - first, states)


def _gather_held(layer: _Layer | None, optimizer: OptimizerState, group: ExpertGroup):
    ranges = None
    if layer is not None:
        ranges = [
            [None if span is None else (span.start, span.stop, span.names) for span in of_family]
            for of_family in layer.optimizer
        ]
    everyone = [None] * len(group.members)
    dist.all_gather_object(everyone, (ranges, optimizer.steps()), group=group.group)
    return [ranges for ranges, _ in everyone], [steps for _, steps in everyone if steps]


def _differing_steps(steps: list) -> Exception | None:
    if len({tuple(found) for found in steps}) > 1:
        return ValueError(f"step counts of the optimizer differ between ranks: {steps}")
    return None


def _agree(site: Site, failure: Exception | None, group: ExpertGroup) -> None:
    reasons = [None] * dist.get_world_size(group.stage)
    dist.all_gather_object(
        reasons, None if failure is None else f"{type(failure).__name__}: {failure}", group=group.stage
    )
    failed = [(dist.get_global_rank(group.stage, i), why) for i, why in enumerate(reasons) if why]
    if failed:
        rank, why = failed[0]
        raise MigrationError(
            f"expert migration: {site.layer_id} keeps its placement, because rank {rank} failed: {why}. "
            "Nothing of this layer was written; the last checkpoint is whole."
        ) from failure


def _pack(layer: _Layer, pending: list[Move], local: int, group: ExpertGroup):
    members = len(group.members)
    outgoing, incoming = [[] for _ in range(members)], [[] for _ in range(members)]
    for family, spans, transfer in _my_transfers(layer, pending, local, group):
        source, target = divmod(transfer.move.source, local), divmod(transfer.move.target, local)
        sender = group.members[source[0], transfer.sender]
        receiver = group.members[target[0], transfer.receiver]
        if sender == group.index:
            outgoing[receiver] += _bytes_of(spans[family][source[1]], transfer)
        if receiver == group.index:
            incoming[sender] += _bytes_of(spans[family][target[1]], transfer)
    send_sizes = [sum(len(part) for part in parts) for parts in outgoing]
    receive_sizes = [sum(len(part) for part in parts) for parts in incoming]
    device = layer.weights[0][0].states[_WEIGHT].device
    send = torch.empty(sum(send_sizes), dtype=torch.uint8, device=device)
    receive = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
    _fill(send, [part for parts in outgoing for part in parts])
    return send, send_sizes, receive, receive_sizes, [part for parts in incoming for part in parts]


def _my_transfers(layer: _Layer, pending: list[Move], local: int, group: ExpertGroup) -> Iterator:
    for move in pending:
        ends = move.source // local, move.target // local
        if group.expert_rank not in ends:
            continue
        for family in range(len(layer.families)):
            whole = (0, layer.families[family].numel)
            # Every expert-data rank holds the whole weight, so its own rank sends it.
            mine = group.data_rank
            yield family, layer.weights, Transfer(move, mine, mine, *whole)
            held = {}
            for role, slot in (("source", move.source), ("target", move.target)):
                expert_rank, place = divmod(slot, local)
                for data_rank in range(group.data_size):
                    member = group.members[expert_rank, data_rank]
                    held[role, data_rank] = layer.held[member][family][place]
            _check_names(move, held)
            for transfer in transfers(move, held, group.data_size):
                yield family, layer.optimizer, transfer


def _check_names(move: Move, held: dict) -> None:
    kinds = {str(span[2]) for span in held.values() if span}
    if len(kinds) > 1:
        raise ValueError(
            f"slots {move.source} and {move.target} hold different optimizer states: {sorted(kinds)}"
        )


def _bytes_of(span: _Span, transfer: Transfer) -> list[torch.Tensor]:
    inside = slice(transfer.start - span.start, transfer.stop - span.start)
    return [span.states[name][inside].view(torch.uint8) for name in sorted(span.states)]


def _fill(send: torch.Tensor, parts: list[torch.Tensor]) -> None:
    offset = 0
    for part in parts:
        send[offset : offset + len(part)] = part
        offset += len(part)


def _write(receive: torch.Tensor, incoming: list[torch.Tensor]) -> None:
    offset = 0
    for target in incoming:
        target.copy_(receive[offset : offset + len(target)])
        offset += len(target)
