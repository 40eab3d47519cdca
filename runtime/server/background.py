"""An app served from a thread of this process: for notebooks, examples and tests over real HTTP."""

from __future__ import annotations

import socket
import sys
import threading
from typing import Self

import uvicorn
from fastapi import FastAPI

from umbel.lang.errors import EngineError

from .limits import MAX_BODY_BYTES

PING_S = 20.0
# The kernel drops a connection whose peer has taken nothing for so long. Without it one that was
# closed with bytes left to send, because its client is gone, would last until TCP itself gives up.
UNREAD_S = 60


class BackgroundServer:
    """Serves `app` on `host` until closed; port 0 takes a free one. `url` is its address.

    `ping_s` is how long the client of a socket may take to answer a ping, and `max_body_bytes` what
    `app` was made with.

    Raises EngineError when the address can't be used or the app does not start.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        ping_s: float = PING_S,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self._socket = bind(host, port)
        self.url = url_of(self._socket)
        config = server_config(app, grace_s=5, ping_s=ping_s, max_body_bytes=max_body_bytes)
        self._server = _WaitableServer(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="umbel-server", daemon=True
        )
        self._thread.start()
        self._server.is_up.wait()
        if not self._server.started:
            self.close()
            raise EngineError(f"the server at {self.url} did not start")

    def stop(self) -> None:
        """Take no more requests, without waiting for those that run."""
        self._server.should_exit = True

    def close(self, *, force: bool = False) -> None:
        """Stop taking requests; let those that run end, or drop them with `force`. Idempotent."""
        if force:
            self._server.config.timeout_graceful_shutdown = 0
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def server_config(
    app: FastAPI, *, grace_s: int, ping_s: float = PING_S, max_body_bytes: int = MAX_BODY_BYTES
) -> uvicorn.Config:
    """Return how to serve `app`; requests have `grace_s` seconds to end when the server stops.

    `max_body_bytes` is what `app` was made with: longer messages of sockets are not even read.
    A socket's client that answers no ping within `ping_s` is gone. Messages are not compressed:
    that costs more time than it saves between machines near each other.
    """
    return uvicorn.Config(
        app,
        log_level="warning",
        timeout_graceful_shutdown=grace_s,
        lifespan="on",
        ws="websockets-sansio",
        ws_max_size=max_body_bytes,
        ws_ping_interval=ping_s,
        ws_ping_timeout=ping_s,
        ws_per_message_deflate=False,
    )


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address; raises EngineError that names it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small messages at once (TCP_NODELAY) only where the protocol is named; without
    # that an answer may wait 40 ms for its client to acknowledge the one before
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # its connections inherit it: see UNREAD_S
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise EngineError(f"can't listen on {host}:{port}: {error.strerror or error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    """Return the address that a bound socket answers at."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _WaitableServer(uvicorn.Server):
    """A server whose start another thread can wait for."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self.is_up.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve to the end; a start that failed is said here."""
        try:
            await super().serve(sockets)
        finally:
            self.is_up.set()
