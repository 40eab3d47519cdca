"""umbel's own wire form for graphs that grow: one run, and one engine session, for each socket.

`lang.wire` has the messages; docs/server.md says what order they come in and what closes a socket.
A client that goes away cancels its run. Knows no engine, and nothing of how frames are read.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from umbel.lang.errors import (
    BodyTooLargeError,
    EngineError,
    ProgramError,
    UmbelError,
    from_wire,
    to_wire,
)
from umbel.lang.wire import (
    SOCKET_PATH,
    SOCKET_VERSION,
    CancelNodes,
    ClientMessage,
    CloseRun,
    ExtendRun,
    OpenRun,
    RunEvents,
    RunRefused,
    ServerMessage,
    decode_client_message,
    encode_message,
)

from .limits import SocketLimits
from .refusal import deny
from .run import ServerRun
from .service import Service
from .status import ForbiddenOriginError, SlowClientError, TooManySocketsError, close_code_of

logger = logging.getLogger(__name__)


class SocketApi:
    """The route for sockets, and how many are open."""

    def __init__(self, service: Service, limits: SocketLimits) -> None:
        self._service = service
        self._limits = limits
        self._num_open = 0
        self.router = APIRouter()
        self.router.add_api_websocket_route(SOCKET_PATH, self.serve)

    async def serve(self, socket: WebSocket) -> None:
        """Serve one socket to its end."""
        refusal = self._refusal(socket)
        if refusal is not None:
            await deny(socket, refusal)
            return
        self._num_open += 1
        try:
            await socket.accept()
            await _RunSocket(socket, self._service, self._limits).serve()
        finally:
            self._num_open -= 1

    def _refusal(self, socket: WebSocket) -> UmbelError | None:
        if "origin" in socket.headers:
            # A browser asks nobody whether a page may open a socket to this machine's own address,
            # and it always says where the page is from.
            return ForbiddenOriginError("sockets are for programs: a web page may not open one")
        if self._num_open >= self._limits.max_sockets:
            return TooManySocketsError(
                f"{self._limits.max_sockets} sockets are open, and this server takes no more: "
                "try again, or post the pieces"
            )
        return None


class _RunSocket:
    """One socket and its run."""

    def __init__(self, socket: WebSocket, service: Service, limits: SocketLimits) -> None:
        self._socket = socket
        self._service = service
        self._limits = limits
        self._num_bytes = 0  # received
        self._is_closed = False  # by the client: no more pieces

    async def serve(self) -> None:
        """Run to the end, and say why where that is not the run's own."""
        try:
            run = await self._open()
            try:
                await self._follow(run)
            finally:
                run.end()
            await self._socket.close(1000)
        except WebSocketDisconnect:
            return  # whoever is gone is told nothing
        except UmbelError as error:
            await self._refuse(error)
        except Exception as error:  # the server's edge: other sockets go on
            logger.exception("a socket failed")
            await self._refuse(EngineError(f"the server failed: {type(error).__name__}: {error}"))

    async def _open(self) -> ServerRun:
        seconds = self._limits.open_timeout_s
        try:
            async with asyncio.timeout(seconds):
                message = await self._receive()
        except TimeoutError:
            raise SlowClientError(f"no message came within {seconds} s: send 'open'") from None
        if not isinstance(message, OpenRun):
            raise ProgramError("a socket's first message is 'open'")
        if message.version != SOCKET_VERSION:
            raise ProgramError(
                f"this server speaks version {SOCKET_VERSION} of a socket's messages, and not "
                f"{message.version}: see socket_versions in GET /v1/model"
            )
        return ServerRun(self._service, message.options)

    async def _follow(self, run: ServerRun) -> None:
        """Read and write side by side until the run has ended or one of the two can't go on."""
        reading = asyncio.ensure_future(self._read(run))
        writing = asyncio.ensure_future(self._write(run))
        try:
            await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            if writing.done():
                writing.result()
        finally:
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)

    async def _read(self, run: ServerRun) -> None:
        """Take messages; ends by an exception alone."""
        while True:
            # A client that does not read what its nodes make may hand in no more of them. Nothing
            # else waits for this: what it sends stays in its own buffers.
            while run.num_pending > self._limits.max_pending_events:
                await run.wait_until_taken()
            match await self._receive():
                case ExtendRun() if self._is_closed:
                    raise ProgramError("the run is closed: it takes no pieces after 'close'")
                case ExtendRun(graph=graph, failed=failed):
                    await run.extend(
                        graph, {node: from_wire(error) for node, error in failed.items()}
                    )
                case CancelNodes(nodes=nodes):
                    run.cancel(nodes)
                case CloseRun():
                    self._is_closed = True
                    run.close()
                case OpenRun():
                    raise ProgramError("'open' came twice: a run has a socket of its own")

    async def _write(self, run: ServerRun) -> None:
        async for events in run.events(self._service.keep_alive_s):
            await self._send(RunEvents(events))

    async def _receive(self) -> ClientMessage:
        received = await self._socket.receive()
        if received["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(received.get("code", 1006))
        data = received.get("bytes")
        if data is None:
            raise ProgramError("messages are msgpack in binary frames, not text")
        if len(data) > self._service.max_body_bytes:
            raise BodyTooLargeError(
                f"the message is {len(data):,} bytes, and this server takes "
                f"{self._service.max_body_bytes:,}: send less text, or raise max_body_bytes"
            )
        self._num_bytes += len(data)
        if self._num_bytes > self._limits.max_run_bytes:
            raise BodyTooLargeError(
                f"the run has sent more than the {self._limits.max_run_bytes:,} bytes that this "
                "server takes for one: split the program, or raise max_run_bytes"
            )
        return decode_client_message(data)

    async def _send(self, message: ServerMessage) -> None:
        seconds = self._limits.send_timeout_s
        try:
            async with asyncio.timeout(seconds):
                await self._socket.send_bytes(encode_message(message))
        except TimeoutError:
            raise SlowClientError(f"the client took nothing for {seconds} s") from None
        except RuntimeError as error:  # how the framework says that the server side has hung up
            raise WebSocketDisconnect(1006) from error

    async def _refuse(self, error: UmbelError) -> None:
        if isinstance(error, SlowClientError) and self._num_bytes:
            return  # a client that reads nothing would not read this either
        with suppress(WebSocketDisconnect, SlowClientError):
            await self._send(RunRefused(to_wire(error)))
            await self._socket.close(close_code_of(error), type(error).__name__)
