"""Fits in the run: records routing, fits beside training, and decides layer by layer whether a move repays."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch.distributed as dist

from megatron_ciera.moe import fit_process
from megatron_ciera.moe.moves import fewest_moves
from megatron_ciera.moe.placements import Maps
from megatron_ciera.moe.recorder import RouteRecorder, collect
from megatron_ciera.moe.schedule import FitSchedule
from placement.file import LayerId


@dataclass(frozen=True)
class MoveCost:
    """What decides whether a new placement repays. Bytes; tokens of all ranks in an iteration."""

    expert_bytes: int
    row_bytes: int
    tokens_per_iteration: int
    expert_parallel_size: int
    ranks_per_node: int

    def repays(self, rows_before: float, rows_after: float, moved: int, iterations: int) -> bool:
        """Whether a layer's saved traffic exceeds what moving `moved` experts once sends."""
        return self.saved_bytes(rows_before, rows_after, iterations) > moved * self.expert_bytes

    def saved_bytes(self, rows_before: float, rows_after: float, iterations: int) -> float:
        """Bytes that a layer sends less: rows travel out and back, in forward and backward, if not local."""
        remote = 1 - 1 / self.expert_parallel_size
        passes = 4
        rows = (rows_before - rows_after) * self.tokens_per_iteration * iterations
        return rows * self.row_bytes * remote * passes


class Refit:
    """One fit at a time: `before_step` arms it, `after_step` starts it and, `lag` iterations on, returns maps.

    num_recording: ranks that record a layer, the fewest of any layer: with pipeline stages not all of the world's.
    """

    def __init__(
        self,
        schedule: FitSchedule,
        recorders: Mapping[LayerId, RouteRecorder],
        layer_ids: list[LayerId],
        fit_tokens: int,
        num_recording: int,
        make_request: Callable[[], fit_process.FitRequest],
        log: Callable[[str], None],
    ):
        self.schedule = schedule
        self.recorders = recorders
        self.layer_ids = layer_ids
        self.fit_tokens = fit_tokens
        self.num_recording = num_recording
        self.make_request = make_request
        self.log = log
        self.started_at = 0
        self.was_fitted = False
        self.recorded_at = None
        self._process = None
        self._failed = None

    def before_step(self, iteration: int) -> None:
        """Arms the recorders if this iteration's tokens are wanted. Twice as many are recorded as are fitted.

        While a fit is pending no other one begins: a run that caught up may meet its regular iteration soon after.
        """
        if self.recorded_at is None and self.schedule.is_due(iteration, self.started_at, self.was_fitted):
            wanted = -(-2 * self.fit_tokens // self.num_recording)
            for recorder in self.recorders.values():
                recorder.arm(wanted)
            self.recorded_at = iteration

    def after_step(self, iteration: int) -> fit_process.FitAnswer | None:
        """Starts the fit after its iteration. Returns the answer when its time has come; collective then."""
        if self.recorded_at == iteration:
            self._start()
        if self.recorded_at is not None and iteration >= self.recorded_at + self.schedule.lag:
            return self.finish()
        return None

    def finish(self) -> fit_process.FitAnswer | None:
        """The pending fit's answer on every rank, waiting for it; None if there is none. Collective."""
        if self.recorded_at is None:
            return None
        answer = [None]
        if dist.get_rank() == 0:
            answer = [asdict(self._failed or fit_process.answer_of(self._process))]
        dist.broadcast_object_list(answer, src=0)
        self._process, self._failed, self.recorded_at, self.was_fitted = None, None, None, True
        return fit_process.FitAnswer(**answer[0])

    def cancel(self) -> None:
        """Ends a fit that nobody waits for any more."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self.recorded_at = None, None

    def _start(self) -> None:
        try:
            collected = collect(self.recorders, self.layer_ids)
            if collected is None:
                return
            tokens, held_out = collected
            if tokens.shape[1] < self.fit_tokens:
                self.log(
                    f"MoE: fit from {tokens.shape[1]} tokens of iteration {self.recorded_at}, which has fewer than "
                    f"{2 * self.fit_tokens} to fit and to test on"
                )
            self._process = fit_process.start(tokens, held_out, self.make_request())
        except Exception as error:
            # The other ranks wait for an answer: what broke here is the answer.
            self._failed = fit_process.FitAnswer([], [], [], f"{type(error).__name__}: {error}")


def worthwhile(
    answer: fit_process.FitAnswer,
    current: Maps,
    cost: MoveCost,
    iterations: int,
    log: Callable[[str], None],
) -> Maps:
    """The maps to move to: new where a layer's saved bytes repay its move, current elsewhere. Logs the numbers."""
    chosen, moved_experts, saved, skipped = {}, 0, 0.0, 0
    for index, (layer_id, old) in enumerate(current.items()):
        new = fewest_moves(
            old, np.asarray(answer.maps[index]), cost.expert_parallel_size, cost.ranks_per_node
        )
        moved = int((new != old).sum())
        before, after = answer.rows_before[index], answer.rows_after[index]
        if moved and cost.repays(before, after, moved, iterations):
            chosen[layer_id] = new
            moved_experts += moved
            saved += cost.saved_bytes(before, after, iterations)
        else:
            chosen[layer_id] = old
            skipped += moved > 0
    log(
        f"MoE: fit: rows per token on held-out tokens {np.mean(answer.rows_before):.4f} -> "
        f"{np.mean(answer.rows_after):.4f}; moving {moved_experts} experts sends "
        f"{moved_experts * cost.expert_bytes / 1e6:.1f} MB and saves {saved / 1e6:.1f} MB in the next "
        f"{iterations} iterations; {skipped} layers stay because their move would not repay"
    )
    return chosen
