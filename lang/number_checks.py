"""Checks of the numbers that say how something runs; knows nothing of what they are for."""

from __future__ import annotations

MAX_SECONDS = 1e9  # clocks of locks and event loops end somewhere beyond


def check_seconds(name: str, value: object) -> None:
    """Refuse with a TypeError what is no number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number of seconds, not {value!r}")


def check_whole(name: str, value: object, *, least: int) -> None:
    """Refuse what is no whole number, with a TypeError, or too small, with a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, not {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, not {value}")
