"""The head of an answer that is a stream of server-sent events; knows nothing of what is sent."""

from __future__ import annotations

from starlette.responses import Response

from umbel.lang.wire import EVENT_STREAM


class EventStream(Response):
    """An answer of unknown length that nobody on its way may keep. Who inherits sends the body."""

    media_type = EVENT_STREAM

    def __init__(self) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]  # unknown; the base class takes it for 0
