"""What a streamed run yields, and the two streams' interfaces; produces nothing itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from .expressions import ValueExpr

if TYPE_CHECKING:
    from .run_result import Result

R_co = TypeVar("R_co", covariant=True)


class StreamEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened in a run.

    `kind` is ``started`` (a node that needs the model began), ``delta`` (more text of a gen),
    ``value`` (a gen or select has its value: `text`, and `value` where it has a type), ``failed``
    (`error` says why), or ``done``, always the last one.
    """

    kind: Literal["started", "delta", "value", "failed", "done"]
    address: str = ""
    name: str = ""
    text: str = ""
    value: Any = None
    error: BaseException | None = None


class Stream(Protocol[R_co]):
    """A run that is read while it goes on. Iterating gives the root state's text in chunks.

    Chunks concatenate to the final text for any speed of reading; errors are raised after the
    chunks before them. Every iterator starts at the beginning.
    """

    def __iter__(self) -> Iterator[str]:
        """Yield the root state's text."""
        ...

    def text(self, name: str | ValueExpr[Any]) -> Iterator[str]:
        """Yield the text of the first value of that name, be it of the root or a branch."""
        ...

    def partial(self, name: str | ValueExpr[Any]) -> Iterator[Any]:
        """Yield a JSON value as it grows: what is closed so far, as plain dicts and lists.

        Each yielded value holds more than the one before; the last one is the typed value.
        """
        ...

    def events(self) -> Iterator[StreamEvent]:
        """Yield all events, of all branches."""
        ...

    def result(self) -> Result[R_co]:
        """Wait for the end and return the result; raises what the run raised."""
        ...

    def cancel(self) -> None:
        """Stop the run; what has not ended fails with CancelledError."""
        ...


class AsyncStream(Protocol[R_co]):
    """The same on an event loop."""

    def __aiter__(self) -> AsyncIterator[str]:
        """Yield the root state's text."""
        ...

    def text(self, name: str | ValueExpr[Any]) -> AsyncIterator[str]:
        """Yield the text of the first value of that name, be it of the root or a branch."""
        ...

    def partial(self, name: str | ValueExpr[Any]) -> AsyncIterator[Any]:
        """Yield a JSON value as it grows: what is closed so far, as plain dicts and lists.

        Each yielded value holds more than the one before; the last one is the typed value.
        """
        ...

    def events(self) -> AsyncIterator[StreamEvent]:
        """Yield all events, of all branches."""
        ...

    async def result(self) -> Result[R_co]:
        """Wait for the end and return the result; raises what the run raised."""
        ...

    def cancel(self) -> None:
        """Stop the run; what has not ended fails with CancelledError."""
        ...
