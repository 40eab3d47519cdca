"""Opens backends: by reference, over a record, around another; imports only what is asked for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbel.lang.errors import EngineConfigError
from umbel.lang.suggestions import nearest

from .backends.base import Backend

if TYPE_CHECKING:
    from .replay import Recorder, ReplayBackend


#: a host and a port; a model is never named so, whatever else could be wrong with it
_ADDRESS = re.compile(r"[\w.-]+:\d+(/|$)")


def connect(ref: str | PathLike[str], **options: Any) -> Backend:
    """Return a backend for a model reference or a server's URL.

    ``http://`` and ``https://`` lead to an umbel server. Anything else is a model that runs in
    this process: an alias (``smollm2``), a GGUF file, a folder or a hub id; `options` go to its
    engine. OpenAI-compatible endpoints have a backend of their own,
    `umbel.interpreter.backends.openai.OpenAIBackend`.

    Raises ModelLoadError or BackendConnectionError when there is nothing to be found,
    EngineConfigError for an option that is not there or out of its bounds, and ImportError when
    the extra that it needs is not installed.
    """
    ref = _reference(ref)
    if ref.startswith(("http://", "https://")):
        from .backends.remote import RemoteBackend

        _check(options, list(inspect.signature(RemoteBackend).parameters)[1:], "a connection")
        return RemoteBackend(ref, **options)
    if _ADDRESS.match(ref):
        raise EngineConfigError(
            f"{ref!r} is no model; if it is a server's address, write it as 'http://{ref}'"
        )
    from .backends.local import LocalBackend

    _check(options, LocalBackend.option_names(), "the engine")
    return LocalBackend.from_model(ref, **options)


def _reference(ref: object) -> str:
    found = fspath(ref) if isinstance(ref, PathLike) else ref
    if not isinstance(found, str):
        raise TypeError(f"connect takes a model's name or path, or a URL, not {ref!r}")
    return found


def record(backend: Backend, path: str | Path) -> Recorder:
    """Return a backend that runs everything on `backend` and keeps what happened in a file.

    The file is written anew; a run is in it as soon as it has ended. It holds the texts of the
    runs, and of credentials none. Closing the recorder leaves `backend` open. Raises OSError when
    the file can't be written.
    """
    from .replay import Recorder

    return Recorder(backend, path)


def replay(path: str | Path, *, patience: float = 10.0) -> ReplayBackend:
    """Return a backend that answers runs from the file that `record` wrote, without a model.

    A node that was not recorded as it is fails with a BackendError that says what differs. What a
    program cancelled ends when it cancels it again, or after `patience` seconds. Raises OSError
    when the file can't be read, and ProgramError when it is no record.
    """
    from .replay import ReplayBackend

    return ReplayBackend(path, patience=patience)


def _check(options: Mapping[str, Any], known: Collection[str], what: str) -> None:
    for name in options:
        if name not in known:
            raise EngineConfigError(f"{what} has no option {name!r}: {nearest(name, known)}")
