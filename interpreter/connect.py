"""Opens a backend by reference; imports only the one that is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from umbel.lang.errors import EngineConfigError
from umbel.lang.suggestions import nearest

from .backends.base import Backend


def connect(ref: str, **options: Any) -> Backend:
    """Return a backend for a model reference or a server's URL.

    ``http://`` and ``https://`` lead to an umbel server. Anything else is a model that runs in
    this process: an alias (``smollm2``), a GGUF file, a folder or a hub id; `options` go to its
    engine.

    Raises ModelLoadError or BackendConnectionError when there is nothing to be found,
    EngineConfigError for an option that is not there or out of its bounds, and ImportError when
    the extra that it needs is not installed.
    """
    if ref.startswith(("http://", "https://")):
        from .backends.remote import RemoteBackend

        _check(options, list(inspect.signature(RemoteBackend).parameters)[1:], "a connection")
        return RemoteBackend(ref, **options)
    from .backends.local import LocalBackend

    _check(options, LocalBackend.option_names(), "the engine")
    return LocalBackend.from_model(ref, **options)


def _check(options: Mapping[str, Any], known: Collection[str], what: str) -> None:
    for name in options:
        if name not in known:
            raise EngineConfigError(f"{what} has no option {name!r}: {nearest(name, known)}")
