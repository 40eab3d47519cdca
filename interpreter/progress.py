"""A progress bar for batches: tqdm where it is installed and someone is looking."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol

from umbel.lang.errors import ProgramError


class Progress(Protocol):
    """What a batch tells its progress bar."""

    def update(self, n: int = 1) -> object:
        """Count `n` more ended rows."""
        ...


class _Silent:
    def update(self, n: int = 1) -> None:
        """Show nothing."""


@contextmanager
def progress_bar(wanted: bool | None, total: int | None) -> Iterator[Progress]:
    """Yield a progress bar; `wanted=None` shows one on a terminal if tqdm is installed.

    Raises ProgramError when one is demanded and tqdm is not installed.
    """
    is_installed = find_spec("tqdm") is not None
    if wanted and not is_installed:
        raise ProgramError("progress=True needs tqdm: pip install tqdm, or leave progress out")
    if wanted is False or not is_installed or not (wanted or sys.stderr.isatty()):
        yield _Silent()
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="row") as bar:
        yield bar
