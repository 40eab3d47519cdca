"""What the framework refuses itself, in the form of all other errors; knows no routes."""

from __future__ import annotations

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from umbel.lang.errors import ProgramError, to_wire
from umbel.lang.wire import JSON, ErrorResponse


async def answer_routing_error(request: Request, error: Exception) -> Response:
    """Answer a request that no route takes: 404 for its path, 405 for its method."""
    assert isinstance(error, HTTPException), "it is registered for no other"
    asked = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        text = f"{asked}: there is no such route"
        if request.url.path.startswith("/v1/v1/"):
            text += "; the address that was given has a /v1 too many at its end"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        text = f"{asked}: this route takes {allowed}"
    else:
        text = f"{asked}: {error.detail}"
    body = msgspec.json.encode(ErrorResponse(to_wire(ProgramError(text))))
    headers = dict(error.headers or {})
    return Response(body, status_code=error.status_code, headers=headers, media_type=JSON)
