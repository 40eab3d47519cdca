"""Checks of the numbers and flags that say how something runs; knows not what they are for."""

from __future__ import annotations

MAX_SECONDS = 1e9  # clocks of locks and event loops end somewhere beyond


def check_flags(**flags: object) -> None:
    """Refuse with a TypeError what is neither True nor False: "no" would be a yes."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def check_number(name: str, value: object) -> None:
    """Refuse with a TypeError what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, not {value!r}")


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


def check_seed(seed: object) -> None:
    """Refuse what is no seed: a TypeError; or is none of 64 bits, as it is sent: a ValueError."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, not {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit into 64 bits, not {seed}")
