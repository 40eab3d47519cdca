"""An umbel server over HTTP, as a backend; knows no engine.

One thread runs one asyncio loop for all runs of a backend; `remote_session` says what a run sends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Self, TypeVar

import httpx
import msgspec

from umbel.lang.errors import (
    BackendConnectionError,
    BackendError,
    BackendStatusError,
    BackendTimeoutError,
    ProgramError,
    UmbelError,
    from_wire,
)
from umbel.lang.results import Event, RunOptions
from umbel.lang.wire import (
    EVENT_STREAM,
    MODEL_PATH,
    MSGPACK,
    PROGRAMS_PATH,
    STATS_PATH,
    CancelRequest,
    ErrorResponse,
    ModelInfo,
    decode_event,
)

from .base import Capabilities, EventSink, TokenCounter
from .loop_thread import LoopThread
from .remote_session import RemoteSession

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RemoteBackend:
    """Runs graphs on the umbel server at `url`.

    Asks the server at once what it honours. `silence_timeout` is how long a server that should send
    (it sends a comment when there is nothing to tell) may be silent before its runs fail.

    Raises BackendConnectionError or BackendTimeoutError when there is no server at `url`,
    BackendStatusError when what is there is not an umbel server.
    """

    name = "remote"
    token_counter: TokenCounter | None = None  # the tokenizer is the server's

    def __init__(
        self, url: str, *, connect_timeout: float = 10.0, silence_timeout: float = 60.0
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ProgramError(f"a server's address starts with http:// or https://, not {url!r}")
        self.url = url.rstrip("/")
        # No limit on waiting for a free connection: the runs that hold one end or fail in time.
        self._timeout = httpx.Timeout(silence_timeout, connect=connect_timeout, pool=None)
        info = self._read(MODEL_PATH, ModelInfo)
        self.model_name = info.name
        self.capabilities = _capabilities(info)
        self._sessions: set[RemoteSession] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=self._timeout,
            limits=httpx.Limits(max_connections=512, max_keepalive_connections=64),
            trust_env=False,
        )
        self._thread = LoopThread(
            "umbel-remote",
            closed_error=self._closed_error,
            fail_open=self._fail_sessions,
            close_client=self._client.aclose,
        )

    def open(self, options: RunOptions, sink: EventSink) -> RemoteSession:
        """Start a run; its events go to `sink` on the loop's thread. Raises BackendError."""
        session = RemoteSession(self, options, sink)
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

    def forget(self, session: RemoteSession) -> None:
        """Drop a run that is over."""
        self._sessions.discard(session)

    async def stream(self, body: bytes) -> AsyncGenerator[list[Event]]:
        """Post a run and yield its events as they come; raises BackendError or the server's own."""
        headers = {"content-type": MSGPACK, "accept": EVENT_STREAM}
        try:
            async with self._client.stream(
                "POST", PROGRAMS_PATH, content=body, headers=headers
            ) as response:
                if response.status_code != 200:
                    raise _status_error(self.url, response.status_code, await response.aread())
                async for data in _messages(response):
                    yield [decode_event(one) for one in data]
        except httpx.HTTPError as error:
            raise _transport_error(self.url, error) from error
        except msgspec.DecodeError as error:
            raise BackendError(
                f"{self.url} sent what is not an event ({error}): is it the same version of umbel?",
                backend=self.name,
            ) from error

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
            response = httpx.get(self.url + path, timeout=self._timeout, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise _transport_error(self.url, error) from error
        if response.status_code != 200:
            raise _status_error(self.url, response.status_code, response.content)
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise BackendStatusError(
                f"{self.url} answers, but not as an umbel server: {error}",
                backend=self.name,
                status_code=response.status_code,
            ) from error

    def _fail_sessions(self) -> None:
        for session in list(self._sessions):
            session.fail_unfinished(self._closed_error())


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
    return msgspec.convert(values, Capabilities)


def _status_error(url: str, status_code: int, body: bytes) -> UmbelError:
    """Return the server's own error, or one that names the status."""
    try:
        return from_wire(msgspec.json.decode(body, type=ErrorResponse).error)
    except msgspec.DecodeError:
        text = body[:200].decode("utf-8", "replace")
    return BackendStatusError(
        f"{url} answered {status_code}: {text}",
        backend=RemoteBackend.name,
        retryable=status_code in (429, 502, 503, 504),
        status_code=status_code,
    )


def _transport_error(url: str, error: Exception) -> BackendError:
    what = str(error) or type(error).__name__
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        return BackendTimeoutError(
            f"{url} fell silent ({what}): is it overloaded, or gone?",
            backend=RemoteBackend.name,
            retryable=True,
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL):
        text = f"can't connect to {url} ({what}): start one with `umbel serve MODEL`"
    else:
        text = f"the connection to {url} broke: {what}"
    return BackendConnectionError(text, backend=RemoteBackend.name, retryable=True)
