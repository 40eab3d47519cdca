"""Tells a backend's process from a fork of it, which has none of the threads that answer."""

from __future__ import annotations

import os

from umbel.lang.errors import BackendError


class OwnProcess:
    """The process that a backend was made in."""

    __slots__ = ("_backend", "_pid")

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._pid = os.getpid()

    def check(self) -> None:
        """Raise BackendError in any other process: whoever waited there would wait for ever."""
        if os.getpid() != self._pid:
            raise BackendError(
                f"the {self._backend} backend belongs to process {self._pid}, and this is a fork "
                "of it, without its threads: make a backend after the fork, or start processes "
                "with multiprocessing's 'spawn'",
                backend=self._backend,
            )
