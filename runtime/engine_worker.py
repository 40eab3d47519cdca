"""The engine's process: an engine, a socket to the process that started it, and nothing else.

Run by `engine_process.EngineClient`. It ends when its engine does, and when its parent does.
Knows messages; nothing of graphs.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from umbel.lang.errors import EngineConfigError, EngineStoppedError, UmbelError, from_wire, to_wire
from umbel.lang.graph import RequestGraph
from umbel.lang.results import Event, NodeFailed

from .engine import Engine
from .engine_messages import (
    TO_ENGINE,
    Alive,
    Answer,
    Ask,
    CancelSession,
    Channel,
    CloseSession,
    ExtendSession,
    ForgetSession,
    FromEngine,
    Happened,
    LoadFailed,
    OpenSession,
    Ready,
    SetUp,
    Stop,
    Stopped,
)
from .engine_session import EngineSession
from .log_relay import relay_logs

logger = logging.getLogger(__name__)

#: events that wait to be sent before the engine waits too
MAX_PENDING_EVENTS = 16_384
_EVENTS_A_MESSAGE = 4_096
_LOOK_S = 1.0  # how often to look whether the parent is there
EXIT_LOST_PARENT = 3
EXIT_NOT_LOADED = 4
EXIT_STOPPED = 5  # the engine stopped by itself


def from_model(ref: str, options: dict[str, Any]) -> Engine:
    """Load a model: the factory of every engine but a test's."""
    return Engine.from_model(ref, **options)


def main(fd: int, parent: int) -> NoReturn:
    """Be an engine's process: the parent, of this process id, is at the other end of socket `fd`.

    Never returns: threads that hang in a device's library must not keep the process.
    """
    threading.Thread(target=_end_with, args=[parent], name="umbel-parent", daemon=True).start()
    channel = Channel(socket.socket(fileno=fd))
    data = channel.receive()
    if data is None:
        os._exit(EXIT_LOST_PARENT)
    setup = TO_ENGINE.decode(data)
    assert isinstance(setup, SetUp), "the first message says which engine this is to be"
    outbox = Outbox(channel)
    relay_logs(setup.log_levels, outbox.put)
    worker = EngineWorker(channel, outbox)
    threading.Thread(target=worker.read, name="umbel-commands", daemon=True).start()
    try:
        engine = _factory(setup.factory)(**setup.arguments)
    except Exception as error:  # the process's edge
        outbox.put(LoadFailed(to_wire(error)))
        outbox.flush()
        os._exit(EXIT_NOT_LOADED)
    worker.start(engine, setup.alive_s)
    engine.stopped.wait()
    cause = engine.stop_cause
    outbox.put(Stopped(None if cause is None else to_wire(cause), engine.stats()))
    outbox.flush()
    os._exit(0 if cause is None else EXIT_STOPPED)


def _factory(place: str) -> Callable[..., Engine]:
    module, colon, name = place.partition(":")
    if not colon:
        raise EngineConfigError(f"an engine's factory is module:function, not {place!r}")
    made: Callable[..., Engine] = getattr(importlib.import_module(module), name)
    return made


def _end_with(parent: int) -> None:
    """End when the parent has: its end of the socket may live on in a process that it forked."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(EXIT_LOST_PARENT)


class Outbox:
    """What waits to be sent, and the thread that sends it: many events in one message.

    Who brings events waits while the parent is too far behind to take more; the order is kept.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._waiting: deque[FromEngine | tuple[int, Sequence[Event]]] = deque()
        self._num_events = 0
        self._is_sending = False
        threading.Thread(target=self._send_all, name="umbel-events", daemon=True).start()

    def put(self, message: FromEngine) -> None:
        """Send a message when its turn comes."""
        with self._changed:
            self._waiting.append(message)
            self._changed.notify_all()

    def put_events(self, run: int, events: Sequence[Event]) -> None:
        """Send a run's events when their turn comes; waits while too many do."""
        with self._changed:
            while self._num_events >= MAX_PENDING_EVENTS:
                self._changed.wait()
            self._num_events += len(events)
            self._waiting.append((run, events))
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything has been sent."""
        with self._changed:
            while self._waiting or self._is_sending:
                self._changed.wait()

    def _send_all(self) -> None:
        while True:
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()
                while not self._waiting:
                    self._changed.wait()
                message = self._next()
                self._is_sending = True
            try:
                self._channel.send(message)
            except OSError:
                os._exit(EXIT_LOST_PARENT)

    def _next(self) -> FromEngine:
        first = self._waiting.popleft()
        if not isinstance(first, tuple):
            return first
        runs = [(first[0], list(first[1]))]
        num = len(first[1])
        while self._waiting and num < _EVENTS_A_MESSAGE:
            entry = self._waiting[0]
            if not isinstance(entry, tuple):
                break
            self._waiting.popleft()
            runs.append((entry[0], list(entry[1])))
            num += len(entry[1])
        self._num_events -= num
        return Happened(runs)


class EngineWorker:
    """Does what the parent says."""

    def __init__(self, channel: Channel, outbox: Outbox) -> None:
        self._channel = channel
        self._outbox = outbox
        self._engine: Engine | None = None
        self._sessions: dict[int, EngineSession] = {}

    def start(self, engine: Engine, alive_s: float) -> None:
        """Take runs from now on."""
        self._engine = engine
        self._outbox.put(Ready(engine.model_name, engine.max_seq_len, list(engine.token_bytes)))
        if alive_s > 0:
            threading.Thread(
                target=self._say_alive, args=[alive_s], name="umbel-alive", daemon=True
            ).start()

    def _say_alive(self, every_s: float) -> None:
        while True:
            time.sleep(every_s)
            self._outbox.put(Alive())

    def read(self) -> None:
        """Take messages until the parent is gone, and end the process then."""
        try:
            while (data := self._channel.receive()) is not None:
                self._take(data)
        except BaseException:  # the process's edge: without commands it is of no use
            logger.exception("the engine's process could not follow its parent")
        os._exit(EXIT_LOST_PARENT)

    def _take(self, data: bytes) -> None:
        message, engine = TO_ENGINE.decode(data), self._engine
        if engine is None:
            assert isinstance(message, Stop), "nobody opens runs before the engine is there"
            os._exit(0)
        match message:
            case OpenSession():
                self._open(engine, message)
            case ExtendSession():
                self._extend(message.run, message.graph, message)
            case CancelSession(run=run, nodes=nodes):
                if run in self._sessions:
                    self._sessions[run].cancel(nodes)
            case CloseSession(run=run):
                if run in self._sessions:
                    self._sessions[run].close()
            case ForgetSession(run=run):
                self._sessions.pop(run, None)
            case Ask(what="reset_cache"):  # which waits for the step that runs
                threading.Thread(target=self._answer, args=[engine, message], daemon=True).start()
            case Ask():
                self._answer(engine, message)
            case Stop(drain=drain):
                threading.Thread(target=engine.close, args=[drain], daemon=True).start()
            case SetUp():
                raise AssertionError("an engine is set up once")

    def _open(self, engine: Engine, message: OpenSession) -> None:
        run, outbox = message.run, self._outbox

        def sink(events: Sequence[Event]) -> None:
            outbox.put_events(run, events)

        failed = {node: from_wire(error) for node, error in message.failed.items()}
        try:
            session = engine.open(message.options, sink, message.resolved, failed)
        except EngineStoppedError:
            return  # the process is about to end, which is what the run's nodes will be told
        self._sessions[run] = session

    def _extend(self, run: int, graph: RequestGraph, message: ExtendSession) -> None:
        session = self._sessions.get(run)
        if session is None:
            return  # see _open
        failed = {node: from_wire(error) for node, error in message.failed.items()}
        try:
            session.extend(graph, failed)
        except EngineStoppedError:
            return
        except UmbelError as error:  # the client has checked the piece: this is a defect
            told = to_wire(error)
            nodes = [node.id for node in graph.nodes if node.id not in failed]
            self._outbox.put_events(run, [NodeFailed(node, told) for node in nodes])

    def _answer(self, engine: Engine, question: Ask) -> None:
        number = question.number
        try:
            value: Any
            match question.what:
                case "stats":
                    value = engine.stats()
                case "reset_cache":
                    value = engine.reset_cache()
                case "count_tokens":
                    value = engine.count_tokens(question.text)
        except Exception as error:  # the process's edge: whoever asks is told
            self._outbox.put(Answer(number, error=to_wire(error)))
        else:
            self._outbox.put(Answer(number, value))
