"""One run on an OpenAI-compatible endpoint: each gen and select is a call of its own.

Lives on the backend's loop; knows how a node is answered, tried again and timed out, no transport.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from umbel.lang.errors import BackendError, NodeTimeoutError, UmbelError, described
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Select
from umbel.lang.results import Event, NodeResult, RunOptions

from ..executor import Executor
from .base import EventSink
from .openai_features import BACKEND, Refusals
from .openai_requests import Prompt, prompt_of
from .run_door import RunDoor

logger = logging.getLogger(__name__)


class Link(Protocol):
    """What a session asks of the backend that opened it."""

    def call(self, command: Callable[[], object]) -> None:
        """Run a command on the loop's thread; raises BackendError once the backend is closed."""
        ...

    async def answer(
        self, node: GraphNode, prompt: Prompt, options: RunOptions, emit: Callable[[str], None]
    ) -> NodeResult:
        """Answer a gen or select; raises UmbelError. `emit` gets a gen's text as it comes."""
        ...

    def forget(self, session: OpenAISession) -> None:
        """Drop a run that is over."""
        ...


class OpenAISession:
    """One run. All its state but the nodes' checks belongs to the loop's thread."""

    def __init__(
        self, link: Link, options: RunOptions, sink: EventSink, refusals: Refusals
    ) -> None:
        self._link = link
        self._door = RunDoor(link.call)
        self._options = options
        self._refusals = refusals
        self._user_sink = sink
        self._executor = Executor(self._deliver)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_expired = False
        self._is_closed = False

    def extend(self, piece: RequestGraph) -> None:
        """Hand over more of the graph.

        Raises UnsupportedFeatureError or ProgramError, with nothing sent, when a node asks for what
        the endpoint can't honour, and BackendError when the backend is closed.
        """
        self._door.extend(piece, self._take, check=self._refusals.check)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Stop nodes (all, by default) that have not ended."""
        ids = None if nodes is None else list(nodes)
        self._door.tell(lambda: self._cancel(ids))

    def close(self) -> None:
        """Promise that no more pieces come. Idempotent."""
        self._door.tell(self._close)

    # --- on the loop's thread -----------------------------------------------------------------

    def start(self) -> None:
        """Start the run's clock."""
        if self._options.timeout is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._options.timeout, self._expire)

    def fail_all(self, error: Callable[[GraphNode], UmbelError]) -> None:
        """Fail every node that has not ended."""
        self._executor.fail_all(error)
        self._advance()

    def _take(self, piece: RequestGraph) -> None:
        self._executor.add(piece)
        if self._is_expired:
            self._expire()
        else:
            self._advance()

    def _cancel(self, nodes: list[int] | None) -> None:
        self._executor.cancel(nodes)
        self._advance()

    def _close(self) -> None:
        self._is_closed = True
        self._advance()

    def _expire(self) -> None:
        self._is_expired = True
        limit = self._options.timeout
        self.fail_all(
            lambda node: NodeTimeoutError(f"{node.label}: the run's timeout of {limit} s passed")
        )

    def _advance(self) -> None:
        """Start what is ready, stop what is unwanted, deliver what happened."""
        executor = self._executor
        for node_id in executor.take_stopped():
            task = self._tasks.pop(node_id, None)
            if task is not None:
                task.cancel()
        loop = asyncio.get_running_loop()
        for node in executor.take_ready():
            self._tasks[node.id] = loop.create_task(self._run(node))
        executor.deliver()
        if self._is_closed and executor.is_idle:
            if self._timer is not None:
                self._timer.cancel()
            self._link.forget(self)

    def _deliver(self, events: Sequence[Event]) -> None:
        try:
            self._user_sink(events)
        except Exception:  # the sink is the user's side: it must not stop the loop
            logger.exception("the event sink of a run failed; the run is cancelled")
            self._user_sink = _drop
            asyncio.get_running_loop().call_soon(self._cancel, None)

    async def _run(self, node: GraphNode) -> None:
        """See a node through to its end."""
        try:
            result = await self._answer(node)
        except asyncio.CancelledError:
            return  # whoever cancels has ended the node
        except UmbelError as error:
            self._executor.fail(node.id, error)
        except Exception as error:  # the task's edge: nobody else would end the node
            logger.error("%s failed on an endpoint: %s", node.label, type(error).__name__)
            self._executor.fail(node.id, BackendError(described(error), backend=BACKEND))
        else:
            self._executor.finish(node.id, result)
        self._tasks.pop(node.id, None)
        self._advance()

    async def _answer(self, node: GraphNode) -> NodeResult:
        op = node.op
        assert isinstance(op, Gen | Select), "an executor starts gens and selects"
        executor = self._executor
        prompt = prompt_of(executor.text_before(node), executor.messages_before(node))

        def emit(text: str) -> None:
            executor.delta(node.id, text)
            executor.deliver()

        try:
            async with asyncio.timeout(op.timeout):
                return await self._link.answer(node, prompt, self._options, emit)
        except UmbelError:  # some are TimeoutErrors too
            raise
        except TimeoutError:
            raise NodeTimeoutError(f"{node.label}: timeout of {op.timeout} s passed") from None


def _drop(_: Sequence[Event]) -> None:
    pass
