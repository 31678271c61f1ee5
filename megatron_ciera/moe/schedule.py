"""When a run without a placement file fits: pure iteration arithmetic, the same after a resume."""

from dataclasses import dataclass

_LAG = 5


@dataclass(frozen=True)
class FitSchedule:
    """Fits at `first` and every `interval` iterations after it (0: only once). Iterations are 1-based.

    The fit itself runs beside training and is applied `lag` iterations after its tokens were recorded: a
    fixed number, so that the same run does the same again.
    """

    first: int
    interval: int

    @property
    def lag(self) -> int:
        return _LAG if self.interval == 0 else min(_LAG, self.interval - 1)

    def is_due(self, iteration: int, started_at: int, was_fitted: bool) -> bool:
        """Whether tokens are recorded in `iteration` of a run that started after `started_at`.

        A run resumed behind `first` without ever having been fitted catches up in its first iteration.
        """
        if not was_fitted and started_at >= self.first:
            return iteration == started_at + 1 or self._is_regular(iteration)
        return self._is_regular(iteration)

    def _is_regular(self, iteration: int) -> bool:
        if iteration < self.first:
            return False
        behind = iteration - self.first
        return behind == 0 if self.interval == 0 else behind % self.interval == 0

    def iterations_until_next(self, iteration: int, train_iters: int) -> int:
        """For how many iterations a placement applied after `iteration` will serve."""
        end = train_iters
        if self.interval:
            end = min(end, self.first + ((iteration - self.first) // self.interval + 1) * self.interval)
        return max(0, end - iteration)
