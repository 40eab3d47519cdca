"""Every error umbel raises on purpose, in one tree; knows nothing of where they are raised.

UmbelError
  ProgramError                the program is wrong
    UnknownNameError          reads a name nothing wrote (also KeyError)
    GenerationError           reads what a failed node should have made
    TruncatedError            reads a constrained value cut by max_tokens
    ConstraintError           a regex, schema or grammar that can't be used (also ValueError)
      InvalidValueError       a finished value that a schema with strict=False forbids
    AuthenticationError       the server wants a key that was not sent
    BodyTooLargeError         more text at once than the server takes
  BackendError                a backend failed; .retryable says whether trying again can help
    UnsupportedFeatureError   the backend can't honour what was asked
    BackendConnectionError
    BackendTimeoutError       (also TimeoutError)
    BackendStatusError        an HTTP status that is not success
  EngineError
    EngineConfigError         a setting is out of its bounds (also ValueError)
    ModelLoadError            a model can't be found, read or matched to its configuration
    RequestRejectedError      the engine will never be able to run this request
    EngineStoppedError        the engine is no longer running
  CancelledError              the node was cancelled before it finished
  NodeTimeoutError            the node's own deadline passed (also TimeoutError)

`to_wire` and `from_wire` carry an error over a process or network border without losing its
class, message or data. What a program raises may be anything: `described` and `causes_of` also
take an exception whose text can't be made, and chains that come back to themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import msgspec

RejectReason = Literal["too_long", "queue_full", "cannot_fit"]


class UmbelError(Exception):
    """Base of every error that umbel raises on purpose."""

    #: attributes that travel in `to_wire`, in the order of the class's keyword arguments
    wire_fields: ClassVar[tuple[str, ...]] = ()


class ProgramError(UmbelError):
    """The program asks for something that has no meaning."""


class UnknownNameError(ProgramError, KeyError):
    """A read of a name that no node wrote."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class GenerationError(ProgramError):
    """A read of what a failed node should have made; the cause is chained."""

    wire_fields = ("address",)

    def __init__(self, message: str, *, address: str = "") -> None:
        super().__init__(message)
        self.address = address


class TruncatedError(ProgramError):
    """A constrained value was cut by max_tokens; `partial` is the text so far."""

    wire_fields = ("partial",)

    def __init__(self, message: str, *, partial: str = "") -> None:
        super().__init__(message)
        self.partial = partial


class ConstraintError(ProgramError, ValueError):
    """A constraint that can't be used; `where` is a position or a JSON pointer."""

    wire_fields: ClassVar[tuple[str, ...]] = ("where",)

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class InvalidValueError(ConstraintError):
    """A finished value that its schema forbids; `where` leads to the part, `text` is the value."""

    wire_fields = ("where", "text")

    def __init__(self, message: str, *, where: str = "", text: str = "") -> None:
        super().__init__(message, where=where)
        self.text = text


class AuthenticationError(ProgramError):
    """The server wants a key, and this client has none or another."""


class BodyTooLargeError(ProgramError):
    """A request's body, or a message on a socket, is longer than the server takes."""


class BackendError(UmbelError):
    """A backend failed."""

    wire_fields: ClassVar[tuple[str, ...]] = ("backend", "retryable")

    def __init__(self, message: str, *, backend: str = "", retryable: bool = False) -> None:
        super().__init__(message)
        self.backend = backend
        self.retryable = retryable


class UnsupportedFeatureError(BackendError):
    """The backend can't honour a feature; raised before a token is paid for."""

    wire_fields = ("backend", "feature", "hint")

    def __init__(
        self, message: str = "", *, backend: str = "", feature: str = "", hint: str = ""
    ) -> None:
        text = message or f"{backend} can't honour {feature}" + (f": {hint}" if hint else "")
        super().__init__(text, backend=backend, retryable=False)
        self.feature = feature
        self.hint = hint


class BackendConnectionError(BackendError):
    """The backend can't be reached, or the connection broke."""


class BackendTimeoutError(BackendError, TimeoutError):
    """The backend did not answer in time."""


class BackendStatusError(BackendError):
    """The backend answered with a status that is not success."""

    wire_fields = ("backend", "retryable", "status_code", "request_id")

    def __init__(
        self,
        message: str,
        *,
        backend: str = "",
        retryable: bool = False,
        status_code: int = 0,
        request_id: str = "",
    ) -> None:
        super().__init__(message, backend=backend, retryable=retryable)
        self.status_code = status_code
        self.request_id = request_id


class EngineError(UmbelError):
    """The engine failed or refused."""


class EngineConfigError(EngineError, ValueError):
    """A setting of the engine is out of its bounds."""


class ModelLoadError(EngineError):
    """A model can't be found, read or matched to its configuration."""


class RequestRejectedError(EngineError):
    """The engine refuses a request; `reason` says which limit it meets."""

    wire_fields = ("reason",)

    def __init__(self, message: str, *, reason: RejectReason = "cannot_fit") -> None:
        super().__init__(message)
        self.reason = reason


class EngineStoppedError(EngineError):
    """The engine is no longer running; `__cause__` says why where there is a cause."""


class CancelledError(UmbelError):
    """The node was cancelled before it finished."""


class NodeTimeoutError(UmbelError, TimeoutError):
    """The node's own deadline passed before it finished."""


#: how many errors of a chain travel: each is a level of the JSON or msgpack that carries them
MAX_CAUSES = 32


class WireError(msgspec.Struct, frozen=True):
    """An error as it travels: class name, message, data, and the error that caused it."""

    type: str
    message: str
    data: dict[str, Any] = {}
    cause: WireError | None = None


def _classes() -> dict[str, type[UmbelError]]:
    found: dict[str, type[UmbelError]] = {}
    todo: list[type[UmbelError]] = [UmbelError]
    while todo:
        cls = todo.pop()
        found[cls.__name__] = cls
        todo += cls.__subclasses__()
    return found


def message_of(error: BaseException) -> str:
    """Return an exception's message, or what is wrong with it where it can't be made."""
    try:
        return str(error)
    except Exception as failure:  # of somebody's own class: why it was raised matters more
        return f"(its message can't be shown: __str__ raised {type(failure).__name__})"


def described(error: BaseException) -> str:
    """Return an exception's class and message."""
    return f"{type(error).__name__}: {message_of(error)}"


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its chained causes, each once, the first `MAX_CAUSES` of them."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen and len(seen) < MAX_CAUSES:
        seen.add(id(at))
        yield at
        at = at.__cause__


def to_wire(error: BaseException) -> WireError:
    """Return the travelling form of `error`; an error from outside the tree keeps its name."""
    made: WireError | None = None
    for one in reversed(list(causes_of(error))):
        data = {name: getattr(one, name) for name in getattr(one, "wire_fields", ())}
        made = WireError(type(one).__name__, message_of(one), data, made)
    assert made is not None, "there is one error at least"
    return made


def from_wire(wire: WireError) -> UmbelError:
    """Rebuild an error from its travelling form; an unknown class becomes a BackendError."""
    first = at = _one_from_wire(wire)
    while wire.cause is not None:
        wire = wire.cause
        at.__cause__ = below = _one_from_wire(wire)
        at = below
    return first


def _one_from_wire(wire: WireError) -> UmbelError:
    cls = _classes().get(wire.type)
    if cls is None:
        return BackendError(f"{wire.type}: {wire.message}")
    return cls(wire.message, **{k: wire.data[k] for k in cls.wire_fields if k in wire.data})
