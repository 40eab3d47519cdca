"""Log lines of an engine's process, told to the process that started it. Knows no engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .engine_messages import Logged

ROOT = "umbel"
_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime"}
_PLAIN = (str, int, float, bool, dict, list, type(None))


def log_levels() -> dict[str, int]:
    """Return the level of umbel's logger, and of those below it that have one of their own."""
    levels = {ROOT: logging.getLogger(ROOT).getEffectiveLevel()}
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(ROOT + ".") and (level := logging.getLogger(name).level):
            levels[name] = level
    return levels


def relay_logs(levels: dict[str, int], send: Callable[[Logged], None]) -> None:
    """Send what is logged here, at these levels, instead of writing it."""
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    top = logging.getLogger(ROOT)
    top.propagate = False
    top.addHandler(_Relay(send))


def log_here(line: Logged) -> None:
    """Log a line that another process sent, with this one's handlers."""
    target = logging.getLogger(line.name)
    if target.isEnabledFor(line.level):
        record = target.makeRecord(
            line.name, line.level, "", 0, line.text, (), None, extra=line.extra
        )
        target.handle(record)


class _Relay(logging.Handler):
    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__()
        self._send = send
        self.setFormatter(logging.Formatter("%(message)s"))  # with the traceback, if there is one

    def emit(self, record: logging.LogRecord) -> None:
        extra: dict[str, Any] = {
            name: value
            for name, value in vars(record).items()
            if name not in _STANDARD and isinstance(value, _PLAIN)
        }
        self._send(Logged(record.name, record.levelno, self.format(record), extra))
