"""What bounds a step and what runs, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from umbel.lang.errors import EngineConfigError


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one scheduler; raises EngineConfigError for one that is out of its range."""

    max_step_tokens: int  # rows that one step may compute
    max_running: int  # requests that may hold slots at once
    max_chunk_tokens: int | None = None  # rows of one request in one step; None: the whole budget
    watermark: float = 0.01  # share of the pool kept free for what runs when a request is admitted
    max_wait_steps: int = 1024  # after so many steps in the queue a request goes first

    def __post_init__(self) -> None:
        """Refuse what bounds nothing."""
        for name, value in (
            ("max_step_tokens", self.max_step_tokens),
            ("max_running", self.max_running),
            ("max_chunk_tokens", self.max_chunk_tokens),
            ("max_wait_steps", self.max_wait_steps),
        ):
            if value is not None and value < 1:
                raise EngineConfigError(f"{name} is {value}: it must be at least 1")
        if not 0 <= self.watermark < 1:
            raise EngineConfigError(f"watermark is {self.watermark}: it must be in [0, 1)")

    @property
    def max_chunk(self) -> int:
        """Rows of one request that one step may compute."""
        return min(self.max_chunk_tokens or self.max_step_tokens, self.max_step_tokens)
