"""Streams: a run's events in a log that any number of readers follow at their own speed."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from umbel.lang.errors import (
    CancelledError,
    GenerationError,
    InvalidValueError,
    ProgramError,
    UmbelError,
    UnknownNameError,
)
from umbel.lang.expressions import GenExpr, ValueExpr
from umbel.lang.ir import Gen, RoleEnd, RoleStart, Select
from umbel.lang.results import Event, NodeFailed, NodeFinished, NodeStarted, TextDelta
from umbel.lang.run_result import Result
from umbel.lang.runner import Call
from umbel.lang.state import State
from umbel.lang.streaming import StreamEvent
from umbel.lang.transcript import appended_text, attempts_of, value_of

from .interpreter import Execution
from .partial_json import closed_part

if TYPE_CHECKING:
    from .graph_run import GraphRun
    from .interpreter import Interpreter


class _Log:
    """All events of a run so far; readers wait for more. Unbounded, so no reader holds up a run."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_done = False
        self._wakers: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def add(self, events: Sequence[Event]) -> None:
        """Take more events; from the backend's threads."""
        with self._lock:
            self.events += events
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def end(self) -> None:
        """Say that no more events come."""
        with self._lock:
            self.is_done = True
        self.add(())

    def more_than(self, seen: int) -> Callable[[Callable[[], None]], None]:
        """Return what registers a callback for more than `seen` events, or the end."""

        def register(wake: Callable[[], None]) -> None:
            with self._lock:
                if len(self.events) <= seen and not self.is_done:
                    self._wakers.append(wake)
                    return
            wake()

        return register


class _Reader:
    """One reader's place in a log, and what it makes of the events: the logic of all iterators."""

    def __init__(self, run: GraphRun) -> None:
        self._run = run
        self._sent: dict[int, int] = {}  # characters given out by node

    def root_text(self, event: Event) -> str:
        """Return the text that an event adds to the root state's."""
        if "[" in self._run.nodes[event.node].address:  # a branch's
            return ""
        return self.new_text(event)

    def is_root_border(self, node_id: int) -> bool:
        """Whether a node opens or closes a turn of the root state."""
        node = self._run.nodes[node_id]
        return isinstance(node.op, RoleStart | RoleEnd) and "[" not in node.address

    def new_text(self, event: Event) -> str:
        """Return the text that an event adds to its node's."""
        node = self._run.nodes[event.node]
        sent = self._sent.get(event.node, 0)
        if isinstance(event, TextDelta):
            if (isinstance(node.op, Gen) and node.op.n > 1) or self._may_be_asked_again(event.node):
                return ""
            self._sent[event.node] = sent + len(event.text)
            return event.text
        if isinstance(event, NodeFinished):
            if self._may_be_asked_again(event.node) and not self.fits(event):
                return ""
            return appended_text(node, event.result)[sent:]
        return ""

    def fits(self, event: NodeFinished) -> bool:
        """Whether a gen's text is a value of its type, or the last that will be asked for."""
        assert self._run.exprs is not None, "a run with a listener keeps its expressions"
        node, expr = self._run.nodes[event.node], self._run.exprs[event.node]
        if isinstance(expr, GenExpr) and attempts_of(node.address) > expr.retries:
            return True
        try:
            value_of(node, event.result, expr)
        except GenerationError:
            return False
        except ProgramError:  # cut: asking again would not help
            return True
        return True

    def is_asked_again(self, node_id: int, error: UmbelError) -> bool:
        """Whether another attempt follows a gen that failed."""
        if not self._may_be_asked_again(node_id):
            return False
        assert self._run.exprs is not None, "a run with a listener keeps its expressions"
        expr, node = self._run.exprs[node_id], self._run.nodes[node_id]
        assert isinstance(expr, GenExpr), "nothing else is asked for again"
        is_value = isinstance(error.__cause__, InvalidValueError)
        return is_value and attempts_of(node.address) <= expr.retries

    def _may_be_asked_again(self, node_id: int) -> bool:
        assert self._run.exprs is not None, "a run with a listener keeps its expressions"
        expr = self._run.exprs.get(node_id)
        return isinstance(expr, GenExpr) and expr.retries > 0

    def stream_event(self, event: Event) -> StreamEvent | None:
        """Return what a program's user sees of an event; None for text, turns, forks and joins."""
        node = self._run.nodes[event.node]
        assert self._run.exprs is not None, "a run with a listener keeps its expressions"
        expr = self._run.exprs.get(event.node)
        if expr is None:
            return None
        at = (node.address, expr.name)
        match event:
            case NodeStarted():
                return StreamEvent("started", *at)
            case TextDelta(text=text):
                return StreamEvent("delta", *at, text)
            case NodeFinished(result=result):
                try:
                    value = value_of(node, result, expr)
                except ProgramError as error:
                    return StreamEvent("failed", *at, result.text, None, error)
                return StreamEvent("value", *at, result.text, value)
            case NodeFailed():
                return StreamEvent("failed", *at, "", None, self._run.failure(event.node))


class _NamedReader:
    """Follows the first node that has a name."""

    def __init__(self, run: GraphRun, name: str) -> None:
        self._run = run
        self._name = name
        self._reader = _Reader(run)
        self._node: int | None = None
        self.is_done = False

    def take(self, event: Event) -> str:
        """Return the text that an event adds; raises the node's error."""
        op = self._run.nodes[event.node].op
        if self._node is None and isinstance(op, Gen | Select) and op.name == self._name:
            self._node = event.node
        if event.node != self._node:
            return ""
        if isinstance(event, NodeFailed):
            error = self._run.failure(event.node)
            assert error is not None, "a failed node has its error"
            if self._reader.is_asked_again(event.node, error):
                self._node = None
                return ""
            raise error
        if isinstance(event, NodeFinished) and not self._reader.fits(event):
            self._node = None  # the next attempt has the name too
            return ""
        self.is_done = isinstance(event, NodeFinished)
        return self._reader.new_text(event)

    def value(self) -> Any:
        """Return the finished node's value as its type."""
        assert self._node is not None, "is_done is set by a node"
        assert self._run.exprs is not None, "a run with a listener keeps its expressions"
        expr = self._run.exprs[self._node]
        return value_of(self._run.nodes[self._node], self._run.result(self._node), expr)

    def check_found(self) -> None:
        """Raise UnknownNameError if the run ended without the name."""
        if self._node is None:
            raise UnknownNameError(f"the run made nothing named {self._name!r}")


class _PartialReader:
    """What is closed of one name's JSON value, each time there is more."""

    def __init__(self, named: _NamedReader) -> None:
        self.named = named
        self._text = ""
        self._last: Any = None

    def take(self, event: Event) -> list[Any]:
        """Return the value so far if an event has made it grow, and the typed one at the end."""
        self._text += self.named.take(event)
        if self.named.is_done:
            return [self.named.value()]
        found = closed_part(self._text)
        if found == self._last:
            return []
        self._last = found
        return [found]


class _StreamCore:
    """What both streams share: the execution, its log, and its end."""

    def __init__(self) -> None:
        self.log = _Log()
        self.execution: Execution

    @property
    def run(self) -> GraphRun:
        """The run that is streamed."""
        return self.execution.run

    def unseen(self, seen: int) -> list[Event]:
        """Return the events after the first `seen`."""
        return self.log.events[seen:]

    def is_over(self, seen: int) -> bool:
        """Whether there will be nothing after the first `seen` events."""
        return self.log.is_done and seen == len(self.log.events)

    def result(self) -> Result[Any]:
        """Return the ended run's result; raises its error."""
        return self.execution.checked_result()

    def cancel(self) -> None:
        """Stop the run."""
        self.run.abort(CancelledError("the stream was cancelled"))


class ThreadStream:
    """A stream read from threads; see `umbel.lang.streaming.Stream`."""

    def __init__(self, core: _StreamCore) -> None:
        self._core = core

    def __iter__(self) -> Iterator[str]:
        reader = _Reader(self._core.run)
        for event in self._events():
            text = reader.root_text(event)
            if text:
                yield text
        self.result()

    def lines(self) -> Iterator[str]:
        """Yield what iterating yields, with a line break between turns where the text has none."""
        reader = _Reader(self._core.run)
        last, is_new_turn = "\n", False
        for event in self._events():
            text = reader.root_text(event)
            if text:
                yield "\n" + text if is_new_turn and last != "\n" else text
                last, is_new_turn = text[-1], False
            elif isinstance(event, NodeFinished) and reader.is_root_border(event.node):
                is_new_turn = True
        self.result()

    def text(self, name: str | ValueExpr[Any]) -> Iterator[str]:
        """Yield the text of one name's first value, in any branch."""
        reader = _NamedReader(self._core.run, _name_of(name))
        for event in self._events():
            text = reader.take(event)
            if text:
                yield text
            if reader.is_done:
                return
        self.result()
        reader.check_found()

    def partial(self, name: str | ValueExpr[Any]) -> Iterator[Any]:
        """Yield a JSON value as it grows, and the typed value at the end."""
        reader = _PartialReader(_NamedReader(self._core.run, _name_of(name)))
        for event in self._events():
            yield from reader.take(event)
            if reader.named.is_done:
                return
        self.result()
        reader.named.check_found()

    def events(self) -> Iterator[StreamEvent]:
        """Yield all events, of all branches."""
        reader = _Reader(self._core.run)
        for event in self._events():
            made = reader.stream_event(event)
            if made is not None:
                yield made
        yield StreamEvent("done", error=self._core.execution.result().error)

    def result(self) -> Result[Any]:
        """Wait for the end and return the result; raises what the run raised."""
        self.wait()
        return self._core.result()

    def wait(self) -> None:
        """Wait for the end, whatever it is."""
        self._core.run.wait_end()

    @property
    def state(self) -> State:
        """The root state; before the end it is the body's alone."""
        return self._core.execution.state

    @property
    def body_error(self) -> BaseException | None:
        """What the body raised, if it has ended so."""
        return self._core.execution.error

    def on_loop(self) -> LoopStream:
        """Return the same run for readers on the running event loop."""
        return LoopStream(self._core)

    def cancel(self) -> None:
        """Stop the run."""
        self._core.cancel()

    def _events(self) -> Generator[Event]:
        core, seen = self._core, 0
        while not core.is_over(seen):
            core.run.wait_for(core.log.more_than(seen))
            fresh = core.unseen(seen)
            seen += len(fresh)
            yield from fresh


class LoopStream:
    """A stream read on an event loop; see `umbel.lang.streaming.AsyncStream`."""

    def __init__(self, core: _StreamCore, body: Awaitable[None] | None = None) -> None:
        self._core = core
        self._body = body  # the loop keeps weak references only

    async def __aiter__(self) -> AsyncIterator[str]:
        reader = _Reader(self._core.run)
        async for event in self._events():
            text = reader.root_text(event)
            if text:
                yield text
        await self.result()

    async def text(self, name: str | ValueExpr[Any]) -> AsyncIterator[str]:
        """Yield the text of one name's first value, in any branch."""
        reader = _NamedReader(self._core.run, _name_of(name))
        async for event in self._events():
            text = reader.take(event)
            if text:
                yield text
            if reader.is_done:
                return
        await self.result()
        reader.check_found()

    async def partial(self, name: str | ValueExpr[Any]) -> AsyncIterator[Any]:
        """Yield a JSON value as it grows, and the typed value at the end."""
        reader = _PartialReader(_NamedReader(self._core.run, _name_of(name)))
        async for event in self._events():
            for value in reader.take(event):
                yield value
            if reader.named.is_done:
                return
        await self.result()
        reader.named.check_found()

    async def events(self) -> AsyncIterator[StreamEvent]:
        """Yield all events, of all branches."""
        reader = _Reader(self._core.run)
        async for event in self._events():
            made = reader.stream_event(event)
            if made is not None:
                yield made
        yield StreamEvent("done", error=self._core.execution.result().error)

    async def result(self) -> Result[Any]:
        """Wait for the end and return the result; raises what the run raised."""
        await self._core.run.await_end()
        return self._core.result()

    def cancel(self) -> None:
        """Stop the run."""
        self._core.cancel()

    async def _events(self) -> AsyncIterator[Event]:
        core, seen = self._core, 0
        while not core.is_over(seen):
            await core.run.await_for(core.log.more_than(seen))
            fresh = core.unseen(seen)
            seen += len(fresh)
            for event in fresh:
                yield event


def start_stream(interpreter: Interpreter, call: Call) -> ThreadStream:
    """Start a run whose body has a pool thread."""
    core = _StreamCore()
    core.execution = Execution(interpreter, call, listener=core.log.add, loop=None)
    core.run.on_end(core.log.end)
    interpreter.def_threads().submit(core.execution.run_any_body)
    return ThreadStream(core)


def start_async_stream(interpreter: Interpreter, call: Call) -> LoopStream:
    """Start a run on the running loop; a `def` body has a pool thread."""
    import asyncio

    loop = asyncio.get_running_loop()
    core = _StreamCore()
    core.execution = Execution(interpreter, call, listener=core.log.add, loop=loop)
    core.run.on_end(core.log.end)
    return LoopStream(core, loop.create_task(core.execution.arun_body()))


def _name_of(name: str | ValueExpr[Any]) -> str:
    found = name if isinstance(name, str) else name.name
    if not found:
        raise ProgramError(f"{name!r} has no name to stream by: give it one")
    return found
