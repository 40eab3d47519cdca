"""Errors as answers to requests and to handshakes; knows no routes."""

from __future__ import annotations

import msgspec
from starlette.responses import Response
from starlette.websockets import WebSocket

from umbel.lang.errors import AuthenticationError, UmbelError, to_wire
from umbel.lang.wire import JSON, ErrorResponse

from .status import status_of


def refusal(error: UmbelError) -> Response:
    """Return an error as the answer to a request."""
    headers = {"www-authenticate": "Bearer"} if isinstance(error, AuthenticationError) else None
    body = msgspec.json.encode(ErrorResponse(to_wire(error)))
    return Response(body, status_code=status_of(error), headers=headers, media_type=JSON)


async def deny(socket: WebSocket, error: UmbelError) -> None:
    """Answer a handshake with an error instead of a socket."""
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(refusal(error))
    else:
        await socket.close()  # servers without that extension answer with status 403
