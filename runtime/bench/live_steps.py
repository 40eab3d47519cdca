"""Times the steps of an engine in which all of a batch's rows decode; knows no workload."""

from __future__ import annotations

import time

from ..engine import Engine

_IDLE_S = 0.0005


class LiveSteps:
    """Drives an engine without a thread of its own, and times the steps in which all rows live.

    Such a step begins and ends with `num_rows` running, prefills nothing, and follows another one.
    A time is from the end of the step before to the end of this one, so that what an overlapped
    device does meanwhile is in it.
    """

    def __init__(self, engine: Engine, num_rows: int) -> None:
        self.seconds: list[float] = []  # of each such step
        self._engine = engine
        self._num_rows = num_rows
        self._was_live = False
        self._ended = time.perf_counter()

    def step(self) -> None:
        """Step once; where nothing is left to do at once, wait a little for other threads."""
        scheduler = self._engine.core.scheduler
        stats = scheduler.stats
        steps, prefilled, running = stats.steps, stats.tokens_prefilled, scheduler.num_running
        more = self._engine.step()
        ended = time.perf_counter()
        is_live = (
            stats.steps > steps
            and stats.tokens_prefilled == prefilled
            and running == scheduler.num_running == self._num_rows
        )
        if is_live and self._was_live:
            self.seconds.append(ended - self._ended)
        self._was_live, self._ended = is_live, ended
        if not more:
            time.sleep(_IDLE_S)
