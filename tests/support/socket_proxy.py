"""A TCP proxy that does to a connection what networks do: cuts it, stalls it, counts it.

It can also behave as an HTTP proxy that lets no upgrade through.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Self

WS_PATH = b"/v1/programs/socket"


@dataclass
class Fault:
    """What happens to the connections of sockets; other requests pass.

    `cut_after` bytes from the server, or `cut_after_sent` to it, the connection is gone.
    """

    cut_after: int | None = None
    cut_after_sent: int | None = None
    refuse_upgrade: int = 0  # the status of the answer


@dataclass
class Counts:
    sent: int = 0  # bytes from clients
    received: int = 0  # bytes from the server
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)  # the first line of each connection


class SocketProxy:
    """Listens on loopback and forwards to `target` until closed."""

    def __init__(self, target: str, fault: Fault | None = None) -> None:
        self.fault = fault or Fault()
        self.counts = Counts()
        self._host, _, port = target.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._is_up.wait(10)

    def stall(self) -> None:
        """Forward nothing more, with all connections left open."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def flow(self) -> None:
        """Forward again."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def cut(self) -> None:
        """Drop every connection."""

        def drop() -> None:
            for task in list(self._tasks):
                task.cancel()

        self._loop.call_soon_threadsafe(drop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        async def start() -> None:
            self._server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
            port = self._server.sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._is_up.set()

        async def stop() -> None:
            self._server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._loop.run_until_complete(start())
        self._loop.run_forever()
        self._loop.run_until_complete(stop())
        self._loop.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            head = await reader.read(1 << 16)
            self.counts.connections += 1
            self.counts.requests.append(head.split(b"\r\n", 1)[0])
            is_socket = WS_PATH in self.counts.requests[-1]
            if is_socket and self.fault.refuse_upgrade:
                status = self.fault.refuse_upgrade
                writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % status)
                await writer.drain()
                return
            from_there, there = await asyncio.open_connection(self._host, self._port)
            self.counts.sent += len(head)
            there.write(head)
            fault = self.fault if is_socket else Fault()
            pumps = {
                asyncio.ensure_future(self._pump(reader, there, fault.cut_after_sent, is_up=True)),
                asyncio.ensure_future(self._pump(from_there, writer, fault.cut_after, is_up=False)),
            }
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            for end in (writer, there):
                if end is not None:
                    end.transport.abort()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        left: int | None,
        *,
        is_up: bool,
    ) -> None:
        while data := await reader.read(1 << 16):
            await self._flowing.wait()
            if left is not None:
                data = data[:left]
                left -= len(data)
            if is_up:
                self.counts.sent += len(data)
            else:
                self.counts.received += len(data)
            writer.write(data)
            await writer.drain()
            if left == 0:
                return
