"""umbel's own wire form, which RemoteBackend speaks: runs request graphs over HTTP.

`POST /v1/programs` takes a `lang.wire.RunRequest` as JSON or msgpack. It answers with all outcomes
as JSON, or, to `Accept: text/event-stream`, with one server-sent event per `lang.results.Event`.
A client that goes away cancels its run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from umbel.lang.errors import BodyTooLargeError, CancelledError, ProgramError
from umbel.lang.results import Event
from umbel.lang.wire import (
    EVENT_STREAM,
    JSON,
    MSGPACK,
    PROGRAMS_PATH,
    UNREADABLE,
    CancelRequest,
    RunRequest,
    decode_request,
    encode_event,
    encode_response,
)

from .event_stream import EventStream
from .run import ServerRun
from .service import Service
from .status import MediaTypeError

T = TypeVar("T")


class ProgramsApi:
    """The routes for running graphs, and the runs that are going on."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._runs: set[ServerRun] = set()
        self._by_id: dict[str, ServerRun] = {}
        self.router = APIRouter()
        self.router.post(PROGRAMS_PATH, response_model=None)(self.run_program)
        self.router.post(PROGRAMS_PATH + "/{run_id}/cancel", response_model=None)(self.cancel_nodes)

    async def run_program(self, request: Request) -> Response:
        """Run a graph to its end."""
        run_request = await self._read(request)
        run = await ServerRun.of_request(self._service, run_request)
        if EVENT_STREAM in request.headers.get("accept", ""):
            return _RunStream(self, run, run_request.run_id, self._service.keep_alive_s)
        async with self.running(run, run_request.run_id):
            response = await unless_gone(request.receive, run.response())
        if response is None:
            return Response(status_code=499)
        return Response(encode_response(response), media_type=JSON)

    async def cancel_nodes(self, run_id: str, request: Request) -> Response:
        """Stop nodes of a running run; a run that is over has nothing left to stop."""
        try:
            nodes = msgspec.json.decode(await self.read_body(request), type=CancelRequest).nodes
        except UNREADABLE as error:
            raise ProgramError(f"the body is not a list of nodes: {error}") from None
        run = self._by_id.get(run_id)
        if run is not None:
            run.cancel(nodes)
        return Response(status_code=204)

    def cancel_all(self) -> None:
        """Cancel every run, because the server stops."""
        for run in self._runs:
            run.cancel()

    @asynccontextmanager
    async def running(self, run: ServerRun, run_id: str) -> AsyncIterator[None]:
        """Keep a run among those that go on; end it on the way out, whatever happened."""
        self._runs.add(run)
        if run_id:
            self._by_id[run_id] = run
        try:
            yield
        finally:
            self._runs.discard(run)
            if self._by_id.get(run_id) is run:
                del self._by_id[run_id]
            run.end()

    async def _read(self, request: Request) -> RunRequest:
        media_type = request.headers.get("content-type", JSON).split(";")[0].strip().lower()
        if media_type not in (JSON, MSGPACK):
            raise MediaTypeError(
                f"a program comes as {JSON} or {MSGPACK}, not as {media_type}: "
                "set the content-type header"
            )
        return decode_request(await self.read_body(request), media_type)

    async def read_body(self, request: Request) -> bytes:
        """Return a request's body; raises BodyTooLargeError."""
        body, limit = bytearray(), self._service.max_body_bytes
        try:
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise BodyTooLargeError(
                        f"the body is longer than the {limit:,} bytes that this server takes: "
                        "send less text, or raise max_body_bytes"
                    )
        except ClientDisconnect:  # nobody reads the answer, and nothing is wrong here
            raise CancelledError("the client went away before its body had arrived") from None
        return bytes(body)


class _RunStream(EventStream):
    """A run's events as they come. Ends the run even when the client is gone before the first."""

    def __init__(self, api: ProgramsApi, run: ServerRun, run_id: str, keep_alive_s: float) -> None:
        super().__init__()
        self._api = api
        self._run = run
        self._run_id = run_id
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._api.running(self._run, self._run_id):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for events in self._run.events(self._keep_alive_s):
            await send({"type": "http.response.body", "body": _as_sse(events), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _as_sse(events: tuple[Event, ...]) -> bytes:
    if not events:
        return b": still running\n\n"
    return b"".join(b"data: " + encode_event(event) + b"\n\n" for event in events)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` gives, or None, with `work` stopped, when the client goes away first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
