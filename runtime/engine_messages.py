"""What an engine's process and the process that started it say to each other, and how it travels.

Messages are msgpack, each behind its length, on one socket between the two. Graphs, events and
errors are the forms that a server's clients use (lang/wire.py). Knows no engine and no process.
"""

from __future__ import annotations

import socket
import threading
from typing import Any, Literal

import msgspec

from umbel.lang.errors import WireError
from umbel.lang.graph import RequestGraph
from umbel.lang.results import Event, NodeResult, RunOptions

_LENGTH_BYTES = 8
_MAX_BYTES = 1 << 40  # nobody sends so much: what says so is no message

# --- to the engine --------------------------------------------------------------------------


class SetUp(msgspec.Struct, frozen=True, tag="setup"):
    """The first message: `factory`, a `module:function`, is called and returns the engine.

    `log_levels` are those of the parent's loggers; `alive_s` is how often to say `Alive`, 0: never.
    """

    factory: str
    arguments: dict[str, Any]
    log_levels: dict[str, int]
    alive_s: float


class OpenSession(msgspec.Struct, frozen=True, omit_defaults=True, tag="open"):
    """Begins a run, by the client's number for it."""

    run: int
    options: RunOptions
    resolved: dict[int, NodeResult] = {}
    failed: dict[int, WireError] = {}


class ExtendSession(msgspec.Struct, frozen=True, omit_defaults=True, tag="extend"):
    """More of a run's graph."""

    run: int
    graph: RequestGraph
    failed: dict[int, WireError] = {}


class CancelSession(msgspec.Struct, frozen=True, tag="cancel"):
    """Nodes of a run that are no longer wanted; None: all that have not ended."""

    run: int
    nodes: list[int] | None


class CloseSession(msgspec.Struct, frozen=True, tag="close"):
    """A run gets no more pieces."""

    run: int


class ForgetSession(msgspec.Struct, frozen=True, tag="forget"):
    """A run is over: nothing more is said of it."""

    run: int


class Ask(msgspec.Struct, frozen=True, omit_defaults=True, tag="ask"):
    """A question, which an `Answer` with its number answers."""

    number: int
    what: Literal["stats", "reset_cache", "count_tokens"]
    text: str = ""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The engine is to be closed: see Engine.close."""

    drain: float


ToEngine = (
    SetUp | OpenSession | ExtendSession | CancelSession | CloseSession | ForgetSession | Ask | Stop
)

# --- from the engine ------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine has been made, and takes runs."""

    model_name: str
    max_seq_len: int
    token_bytes: list[bytes]  # what each token id spells


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """The factory raised; the process ends."""

    error: WireError


class Happened(msgspec.Struct, frozen=True, gc=False, tag="happened"):
    """Events of runs, in their order."""

    runs: list[tuple[int, list[Event]]]


class Answer(msgspec.Struct, frozen=True, omit_defaults=True, tag="answer"):
    """The answer to the question of this number: a value, or an error."""

    number: int
    value: Any = None
    error: WireError | None = None


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Nothing but that the process can say so."""


class Logged(msgspec.Struct, frozen=True, tag="log"):
    """A line for the log, and what stands beside it."""

    name: str
    level: int
    text: str
    extra: dict[str, Any]


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """The last message: the engine has stopped, and why where that was not asked for."""

    cause: WireError | None
    stats: dict[str, float]  # as they were then


FromEngine = Ready | LoadFailed | Happened | Answer | Alive | Logged | Stopped

TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class Channel:
    """One end of the socket. Any thread may send; one thread receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._file = connected.makefile("rb", buffering=1 << 16)

    def send(self, message: ToEngine | FromEngine) -> None:
        """Send a message; waits while the other side has much to read.

        Raises OSError when the other side is gone, UnicodeEncodeError for text that has no bytes.
        """
        data = self._encoder.encode(message)
        with self._lock:
            self._socket.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def receive(self) -> bytes | None:
        """Return the next message as it came; None when the other side is gone."""
        try:
            length = self._file.read(_LENGTH_BYTES)
            if len(length) < _LENGTH_BYTES:
                return None
            num_bytes = int.from_bytes(length, "little")
            assert num_bytes < _MAX_BYTES, "this is no message's length"
            data = self._file.read(num_bytes)
        except OSError:  # a reset: bytes that it will not read were on their way to a dead process
            return None
        return data if len(data) == num_bytes else None

    def close(self) -> None:
        """Let go of the socket, once nobody receives any more."""
        self._file.close()
        self._socket.close()
