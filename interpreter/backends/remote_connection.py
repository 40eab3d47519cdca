"""Opens a WebSocket to an umbel server and says in umbel's errors what goes wrong on it.

Knows frames and handshakes; of a run it knows nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage, InvalidStatus

from umbel.lang.errors import BodyTooLargeError, UmbelError
from umbel.lang.wire import (
    SOCKET_PATH,
    UNREADABLE,
    ServerMessage,
    decode_server_message,
)

from .remote_errors import broken, not_an_event, silence, status_error, unreachable

# The library tells a debug log every header of a handshake: a key is among them.
_quiet = logging.getLogger(__name__ + ".frames")
_quiet.setLevel(logging.INFO)

MAX_EVENTS_BYTES = 256 << 20  # of one message; a server sends what piled up as one
CLOSE_TIMEOUT_S = 2.0
_NO_SOCKET = frozenset({400, 403, 404, 405, 426, 501})
_BUSY = frozenset({429, 503})


class NoSocketError(Exception):
    """There is no socket to be had, but a request would be answered.

    `is_lasting` tells a server or proxy that has none from one that has none to spare.
    """

    def __init__(self, why: str, *, is_lasting: bool) -> None:
        super().__init__(why)
        self.is_lasting = is_lasting


class RunConnection:
    """An open socket."""

    def __init__(self, url: str, socket: ClientConnection, silence_timeout: float) -> None:
        self._url = url
        self._socket = socket
        self._silence_timeout = silence_timeout

    async def send(self, data: bytes) -> None:
        """Send a message; waits while the server takes none. Raises UmbelError."""
        try:
            await self._socket.send(data)
        except ConnectionClosed as error:
            raise _closed_error(self._url, error) from error

    async def receive(self) -> ServerMessage | None:
        """Return the next message, or None when the server has ended the run. Raises UmbelError.

        A server that has nothing to tell says so in time; one that says nothing has gone.
        """
        try:
            async with asyncio.timeout(self._silence_timeout):
                data = await self._socket.recv(decode=False)
        except TimeoutError as error:
            raise silence(self._url, f"for {self._silence_timeout} s") from error
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == 1000:
                return None
            raise _closed_error(self._url, error) from error
        try:
            return decode_server_message(data)
        except UNREADABLE as error:
            raise not_an_event(self._url, error) from error


@asynccontextmanager
async def open_connection(
    url: str,
    headers: Mapping[str, str],
    *,
    connect_timeout: float,
    silence_timeout: float,
) -> AsyncIterator[RunConnection]:
    """Open a socket on the server at `url` (http or https) and close it afterwards.

    Raises NoSocketError where requests must do, else UmbelError. What the block raises, or a
    cancellation, drops the connection at once.
    """
    socket = await _shake_hands(url, headers, connect_timeout)
    try:
        yield RunConnection(url, socket, silence_timeout)
    except BaseException:
        socket.transport.abort()
        raise
    await socket.close()


async def _shake_hands(
    url: str, headers: Mapping[str, str], connect_timeout: float
) -> ClientConnection:
    try:
        return await _Connect(
            "ws" + url.removeprefix("http") + SOCKET_PATH,
            additional_headers=headers,
            compression=None,
            proxy=None,
            open_timeout=connect_timeout,
            close_timeout=CLOSE_TIMEOUT_S,
            ping_interval=None,  # the server pings; its silence is noticed without
            max_size=MAX_EVENTS_BYTES,
            logger=_quiet,
        )
    except InvalidStatus as error:
        code, body = error.response.status_code, bytes(error.response.body)
        if code in _BUSY or code in _NO_SOCKET or code < 400:
            why = f"the handshake was answered with status {code}"
            raise NoSocketError(why, is_lasting=code not in _BUSY) from error
        raise status_error(url, code, body) from error
    except InvalidMessage as error:  # a connection that broke says nothing about the next one
        raise NoSocketError(str(error), is_lasting=False) from error
    except InvalidHandshake as error:  # an answer, but not of a server that has sockets
        raise NoSocketError(str(error), is_lasting=True) from error
    except TimeoutError as error:
        raise unreachable(url, str(error)) from error
    except (OSError, EOFError) as error:
        raise unreachable(url, str(error) or type(error).__name__) from error


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception:
        """Follow none, as requests do: a key is for the address that was given."""
        return exc


def _closed_error(url: str, error: ConnectionClosed) -> UmbelError:
    """Return what to raise for a connection that ended otherwise than by the run's end."""
    received = error.rcvd
    if received is None:
        cause = error.__cause__
        return broken(url, str(cause or error) or type(error).__name__)
    if received.code == 1009:
        return BodyTooLargeError(f"{url} takes no message of this length: {received.reason}")
    if received.code in (1001, 1012):
        return broken(url, "the server is shutting down")
    said = f"code {received.code}" + (f", {received.reason}" if received.reason else "")
    return broken(url, f"the server closed it ({said})")
