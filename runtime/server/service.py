"""What every group of routes works with; data only."""

from __future__ import annotations

from dataclasses import dataclass

from ..metrics import EngineMetrics
from .host import EngineHost


@dataclass(frozen=True, slots=True)
class Service:
    """An engine as it is served."""

    engine: EngineHost
    metrics: EngineMetrics
    max_body_bytes: int  # of a request's body, and of a socket's message
    keep_alive_s: float  # without an event; then a stream says that it is still there
