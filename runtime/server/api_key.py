"""Lets only those in who know the server's key; knows no routes but those that are open."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from umbel.lang.errors import AuthenticationError, EngineConfigError

from .refusal import deny, refusal


class ApiKeyGate:
    """Answers 401 to requests and sockets whose `authorization` is not the key's bearer token."""

    def __init__(self, app: ASGIApp, api_key: str, open_paths: frozenset[str]) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass."""
        if scope["type"] not in ("http", "websocket") or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("authorization", "")
        # in constant time: how much of a guess is right must not show
        if hmac.compare_digest(given.encode("latin-1"), self._expected):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError(
            "the key that was sent is not this server's: connect with api_key=KEY"
            if given
            else "this server wants a key: connect with api_key=KEY"
        )
        if scope["type"] == "websocket":
            await deny(WebSocket(scope, receive, send), error)
        else:
            await refusal(error)(scope, receive, send)


def check_key(api_key: str) -> None:
    """Raise EngineConfigError for a key that no client can send, or that is none."""
    if not api_key or " " in api_key or not (api_key.isascii() and api_key.isprintable()):
        raise EngineConfigError("the server's api_key must be printable ASCII without spaces")
