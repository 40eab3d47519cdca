"""An umbel server over HTTP, as a backend; knows no engine.

One thread runs one asyncio loop for all runs of a backend. A whole graph is one request; a graph
that grows has a socket of its own. `remote_posts` and `remote_socket` say what a run sends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal, Self, TypeVar, get_args

import httpx
import msgspec

from umbel.lang.errors import (
    BackendError,
    BackendStatusError,
    ProgramError,
    UnsupportedFeatureError,
)
from umbel.lang.results import Event, RunOptions
from umbel.lang.wire import (
    EVENT_STREAM,
    MODEL_PATH,
    MSGPACK,
    PROGRAMS_PATH,
    SOCKET_VERSION,
    STATS_PATH,
    UNREADABLE,
    CancelRequest,
    ModelInfo,
    decode_event,
)

from ..credentials import without_credentials
from .base import Capabilities, EventSink, TokenCounter
from .loop_thread import LoopThread
from .remote_connection import NoSocketError, RunConnection, open_connection
from .remote_errors import not_an_event, status_error, transport_error
from .remote_posts import PostSession
from .remote_socket import SocketSession

logger = logging.getLogger(__name__)
SocketUse = Literal["auto", "never", "required"]
MAX_SOCKETS = 512  # open at once; runs beyond post their pieces
T = TypeVar("T")


class RemoteBackend:
    """Runs graphs on the umbel server at `url`.

    Asks the server at once what it honours. `silence_timeout` is how long a server that should send
    (it says so when there is nothing to tell) may be silent before its runs fail. `api_key` goes
    along as a bearer token. `socket` says how graphs that grow are sent: through a socket where the
    server has one, else as a request for each piece, which a log line tells of ("auto"); as
    requests only ("never"); not at all without a socket ("required").

    Raises BackendConnectionError or BackendTimeoutError when there is no server at `url`,
    BackendStatusError when what is there is not an umbel server.
    """

    name = "remote"
    token_counter: TokenCounter | None = None  # the tokenizer is the server's

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 10.0,
        silence_timeout: float = 60.0,
        api_key: str | None = None,
        socket: SocketUse = "auto",
    ) -> None:
        if not url.startswith(("http://", "https://")):
            shown = without_credentials(url)
            raise ProgramError(f"a server's address starts with http:// or https://, not {shown!r}")
        if "@" in url or "?" in url:
            raise ProgramError("a server's address has no user, password or query: use api_key=")
        if socket not in get_args(SocketUse):
            raise ProgramError(f"socket is one of {', '.join(get_args(SocketUse))}, not {socket!r}")
        self.url = url.rstrip("/")
        self._headers = _headers(api_key)
        # No limit on waiting for a free connection: the runs that hold one end or fail in time.
        self._timeout = httpx.Timeout(silence_timeout, connect=connect_timeout, pool=None)
        self._connect_timeout = connect_timeout
        self._silence_timeout = silence_timeout
        info = self._read(MODEL_PATH, ModelInfo)
        self.max_body_bytes = info.max_body_bytes
        self._num_sockets = 0
        self._socket_use: SocketUse = socket
        if SOCKET_VERSION not in info.socket_versions:
            said = ", ".join(map(str, info.socket_versions)) or "none"
            self._lacks_socket(f"it speaks versions {said} of it, and not {SOCKET_VERSION}")
        self.model_name = info.name
        self.capabilities = _capabilities(info)
        self._sessions: set[PostSession | SocketSession] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=self._timeout,
            headers=self._headers,
            limits=httpx.Limits(max_connections=512, max_keepalive_connections=64),
            trust_env=False,
        )
        self._thread = LoopThread(
            "umbel-remote",
            backend=self.name,
            closed_error=self._closed_error,
            fail_open=self._fail_sessions,
            close_client=self._client.aclose,
        )

    def open(self, options: RunOptions, sink: EventSink) -> PostSession | SocketSession:
        """Start a run; its events go to `sink` on the loop's thread. Raises BackendError."""
        session: PostSession | SocketSession
        if options.is_whole:
            session = PostSession(self, msgspec.structs.replace(options, is_whole=False), sink)
        elif self._socket_use == "never":
            session = PostSession(self, options, sink)
        else:
            session = SocketSession(self, options, sink)
        self.call(lambda: self._sessions.add(session))
        return session

    def stats(self) -> dict[str, float]:
        """Return the counters of the server's engine, over all its clients; raises BackendError."""
        return self._read(STATS_PATH, dict[str, float])

    def close(self) -> None:
        """Drop all connections: unfinished nodes fail with BackendError. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- used by the sessions ---------------------------------------------------------------

    def call(self, command: Callable[[], object]) -> None:
        """Run a command on the loop's thread; raises BackendError once the backend is closed."""
        self._thread.call(command)

    def _closed_error(self) -> BackendError:
        return BackendError(f"the connection to {self.url} was closed", backend=self.name)

    def forget(self, session: PostSession | SocketSession) -> None:
        """Drop a run that is over."""
        self._sessions.discard(session)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[RunConnection]:
        """Open a socket; raises NoSocketError where requests must do, else UmbelError."""
        # Not to wait for another's end: a program that holds a socket may wait for one that has
        # none yet.
        if self._num_sockets >= MAX_SOCKETS:
            raise NoSocketError(f"{MAX_SOCKETS} are open", is_lasting=False)
        self._num_sockets += 1
        try:
            async with open_connection(
                self.url,
                self._headers,
                connect_timeout=self._connect_timeout,
                silence_timeout=self._silence_timeout,
            ) as connection:
                yield connection
        finally:
            self._num_sockets -= 1

    def without_socket(
        self, options: RunOptions, sink: EventSink, reason: NoSocketError
    ) -> PostSession:
        """Return a session that posts; raises UnsupportedFeatureError where that is not wanted."""
        if self._socket_use == "required":
            raise UnsupportedFeatureError(
                f"{self.url} has no socket to run a graph that grows ({reason}), and socket is "
                "'required'",
                backend=self.name,
                feature="socket",
            )
        if reason.is_lasting and self._socket_use != "never":
            self._lacks_socket(str(reason))
        else:
            logger.debug("no socket for a run on %s: %s", self.url, reason)
        session = PostSession(self, options, sink)
        self._sessions.add(session)
        return session

    def _lacks_socket(self, why: str) -> None:
        """Do without sockets from now on; raises UnsupportedFeatureError where they are required.

        The results are the same, but every piece of a graph carries again what it builds on.
        """
        if self._socket_use == "required":
            raise UnsupportedFeatureError(
                f"{self.url} has no socket ({why}), and socket is 'required'",
                backend=self.name,
                feature="socket",
            )
        if self._socket_use == "auto":
            logger.warning(
                "%s has no socket (%s): each piece of a graph that grows is a request of its own",
                self.url,
                why,
            )
        self._socket_use = "never"

    async def stream(self, body: bytes) -> AsyncGenerator[list[Event]]:
        """Post a run and yield its events as they come; raises BackendError or the server's own."""
        headers = {"content-type": MSGPACK, "accept": EVENT_STREAM}
        try:
            async with self._client.stream(
                "POST", PROGRAMS_PATH, content=body, headers=headers
            ) as response:
                if response.status_code != 200:
                    raise status_error(self.url, response.status_code, await response.aread())
                async for data in _messages(response):
                    yield [decode_event(one) for one in data]
        except httpx.HTTPError as error:
            raise transport_error(self.url, error) from error
        except UNREADABLE as error:
            raise not_an_event(self.url, error) from error

    def cancel_nodes(self, run_id: str, nodes: Sequence[int]) -> None:
        """Tell the server, without waiting, that nodes of a post are no longer wanted."""
        body = msgspec.json.encode(CancelRequest(tuple(nodes)))

        async def tell() -> None:
            try:
                await self._client.post(f"{PROGRAMS_PATH}/{run_id}/cancel", content=body)
            except httpx.HTTPError as error:  # they have ended here; the server works in vain
                logger.debug("cancelling nodes of run %s failed: %s", run_id, error)

        task = self._thread.loop.create_task(tell())
        self._telling.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(self._telling.discard)

    # --- the loop -----------------------------------------------------------------------------

    def _read(self, path: str, kind: type[T]) -> T:
        """Get one of the server's documents, from any thread."""
        try:
            response = httpx.get(
                self.url + path, headers=self._headers, timeout=self._timeout, trust_env=False
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise transport_error(self.url, error) from error
        if response.status_code != 200:
            raise status_error(self.url, response.status_code, response.content)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except UNREADABLE as error:
            raise BackendStatusError(
                f"{self.url} answers, but not as an umbel server: {error}",
                backend=self.name,
                status_code=response.status_code,
            ) from error

    def _fail_sessions(self) -> None:
        for session in list(self._sessions):
            session.fail_unfinished(self._closed_error())


def _headers(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key or not api_key:
        raise ProgramError("api_key is not fit for a header: it must be printable ASCII, no spaces")
    return {"authorization": f"Bearer {api_key}"}


async def _messages(response: httpx.Response) -> AsyncIterator[list[bytes]]:
    """Yield the data of server-sent events, as many at a time as arrived together.

    Splits bytes: httpx's own lines also end at characters that JSON leaves as they are (U+2028).
    """
    rest = b""
    async for chunk in response.aiter_bytes():
        *whole, rest = (rest + chunk).split(b"\n\n")
        data = [one.removeprefix(b"data: ") for one in whole if one.startswith(b"data: ")]
        if data:
            yield data


def _capabilities(info: ModelInfo) -> Capabilities:
    """Read capabilities; what only one of the two sides knows is left at its default."""
    known = {field.name for field in dataclasses.fields(Capabilities)}
    values = {name: value for name, value in info.capabilities.items() if name in known}
    values["trunks"] = False  # each row would carry the trunk along once more
    return msgspec.convert(values, Capabilities)
