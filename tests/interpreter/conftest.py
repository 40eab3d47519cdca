"""What the interpreter's tests share: a scripted backend that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend

MakeBackend = Callable[..., ScriptedBackend]


@pytest.fixture
def scripted() -> Iterator[MakeBackend]:
    """Return a maker of scripted backends; the latest one made is the current one."""
    with_backends: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> ScriptedBackend:
        backend = ScriptedBackend(*args, **kwargs)
        chosen = ub.use_backend(backend)
        chosen.__enter__()
        with_backends.append((chosen, backend))
        return backend

    yield make
    for chosen, backend in reversed(with_backends):
        chosen.__exit__(None, None, None)
        backend.close()
