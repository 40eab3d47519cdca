"""A TCP proxy that breaks what a server sends: it drops, stalls, or goes on with garbage.

It knows no protocol, so a fault falls wherever the bytes happen to be: in a status line, a header,
the framing, half an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

Kind = Literal["drop", "stall", "garbage", "refuse"]
#: holds no line break, so that it ends no event and no header by chance
GARBAGE = b"\xff\xfe\x00{[(<%\x7f" * 9


@dataclass(frozen=True)
class Fault:
    """`after` bytes from the server, all connections together, something happens `times` times.

    "refuse" closes the connection before a byte of it has been forwarded.
    """

    kind: Kind
    after: int = 0
    times: int = 1


class FaultyProxy:
    """Stands before a server on loopback. Without a fault it changes nothing."""

    def __init__(self, url: str) -> None:
        at = urlsplit(url)
        assert at.hostname is not None
        assert at.port is not None
        self._host, self._port = at.hostname, at.port
        self._fault: Fault | None = None
        self._left = 0  # bytes until it happens
        self._times = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()  # of connections that may be open
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._own_port}"

    def set(self, fault: Fault | None) -> None:
        """Break what comes from now on; None: break nothing, and let go of what stalls."""
        self._call(self._set(fault))

    def close(self) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._up.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._own_port = int(self._server.sockets[0].getsockname()[1])

    async def _set(self, fault: Fault | None) -> None:
        self._fault = fault
        self._left = 0 if fault is None else fault.after
        self._times = 0 if fault is None else fault.times
        if fault is None:
            await self._drop_all()

    async def _drop_all(self) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _close(self) -> None:
        self._server.close()
        await asyncio.sleep(0)  # what has been accepted becomes a task
        await self._drop_all()
        # what nobody reads any more would never be flushed; transports end in calls of their own
        await asyncio.gather(*map(_end, self._writers), return_exceptions=True)
        await self._drop_all()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._forward(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass  # one of the two is gone, or the test is over
        finally:
            await _end(writer)
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._takes("refuse"):
            return
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        self._writers.add(up_writer)
        sending = asyncio.ensure_future(self._requests(reader, up_writer))
        try:
            await self._answers(up_reader, writer, sending)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await _end(up_writer)
            self._writers.discard(up_writer)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()

    async def _answers(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sending: asyncio.Future[None],
    ) -> None:
        while data := await reader.read(65536):
            broken = self._times > 0 and len(data) >= self._left
            if not broken:
                self._left = max(0, self._left - len(data))
                writer.write(data)
                await writer.drain()
                continue
            writer.write(data[: self._left])
            self._left = 0
            if self._takes("garbage"):
                writer.write(GARBAGE)
                await writer.drain()
                return
            if self._takes("stall"):
                await sending  # until the client goes away
                return
            self._times -= 1
            writer.transport.abort()
            return

    def _takes(self, kind: Kind) -> bool:
        if self._fault is None or self._fault.kind != kind or self._times == 0:
            return False
        self._times -= 1
        return True


async def _end(writer: asyncio.StreamWriter) -> None:
    """Send what was written, and wait until the connection is closed."""
    writer.close()
    try:
        async with asyncio.timeout(0.2):
            await writer.wait_closed()
    except (ConnectionError, TimeoutError, asyncio.CancelledError):
        writer.transport.abort()  # no time is left; whoever cancels waits for nothing else here
