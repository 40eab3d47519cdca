"""An endpoint that answers as a test says: errors, dropped connections, stalls, odd chunks.

`answers` is asked with each request's body and path, and gives what is sent. One thread runs it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sent:
    """What one request gets: raw pieces of the body, and how the connection ends."""

    pieces: Sequence[bytes] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    media_type: str = "text/event-stream"
    stalls: bool = False  # after the pieces, for ever
    drops: bool = False  # the connection is cut before the body's end
    delay: float = 0.0  # before the answer


Answer = Callable[[dict[str, Any]], Sent]


class FakeEndpoint:
    def __init__(self, answer: Answer | Sequence[Sent]) -> None:
        """`answer` is called with each body; of a list each request gets the next one."""
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.num_open = 0
        self.max_open = 0
        self.closed_early = threading.Event()
        self._answer = answer if callable(answer) else self._next_of(list(answer))
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._up.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/v1"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> FakeEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _next_of(answers: list[Sent]) -> Answer:
        return lambda _: answers.pop(0)

    def _serve(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        self._up.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            await self._exchange(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.closed_early.set()
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            self.num_open -= 1
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        pairs = [line.split(": ", 1) for line in head.split("\r\n")[1:] if line]
        headers = {name.lower(): value for name, value in pairs}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.requests.append(body)
        self.headers.append(headers)
        sent = self._answer(body)
        await asyncio.sleep(sent.delay)
        lines = [f"HTTP/1.1 {sent.status} X", f"content-type: {sent.media_type}"]
        lines += [f"{name}: {value}" for name, value in sent.headers.items()]
        lines += ["connection: close"]
        if sent.drops:
            lines.append("content-length: 1000000")
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        for piece in sent.pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if sent.stalls:
            await reader.read()  # until the client goes away
            self.closed_early.set()


def chunk(text: str = "", *, index: int = 0, end: str | None = None, **more: Any) -> bytes:
    """One line of a chat stream."""
    choice = {"index": index, "delta": {"content": text}, "finish_reason": end, **more}
    return line({"id": "x", "object": "chat.completion.chunk", "choices": [choice]})


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 0}
    return line({"id": "x", "choices": [], "usage": counts})


def line(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def text(*deltas: str, end: str = "stop") -> Sent:
    """A whole chat stream."""
    return Sent([*map(chunk, deltas), chunk(end=end), DONE])


def failure(status: int, message: str = "no", code: str | None = None, **headers: str) -> Sent:
    """An error in OpenAI's form."""
    body = {"error": {"message": message, "type": "x", "param": None, "code": code}}
    return Sent([json.dumps(body).encode()], status, headers, "application/json")


def whole(data: Any) -> Sent:
    """An answer that is not a stream."""
    return Sent([json.dumps(data).encode()], media_type="application/json")
