"""Opens a backend by reference; imports only the one that is asked for."""

from __future__ import annotations

from typing import Any

from .backends.base import Backend


def connect(ref: str, **options: Any) -> Backend:
    """Return a backend for a model reference or a server's URL.

    ``http://`` and ``https://`` lead to an umbel server. Anything else is a model that runs in
    this process: an alias (``smollm2``), a GGUF file, a folder or a hub id; `options` go to its
    engine.

    Raises ModelLoadError or BackendConnectionError when there is nothing to be found, and
    ImportError with a hint when the extra that it needs is not installed.
    """
    if ref.startswith(("http://", "https://")):
        from .backends.remote import RemoteBackend

        return RemoteBackend(ref, **options)
    from .backends.local import LocalBackend

    return LocalBackend.from_model(ref, **options)
