"""The error tree as HTTP statuses and close codes, in one table; knows no routes."""

from __future__ import annotations

from umbel.lang.errors import (
    AuthenticationError,
    BackendConnectionError,
    BackendError,
    BackendTimeoutError,
    BodyTooLargeError,
    CancelledError,
    ConstraintError,
    EngineError,
    EngineStoppedError,
    NodeTimeoutError,
    ProgramError,
    RequestRejectedError,
    UmbelError,
    UnsupportedFeatureError,
)


class SlowClientError(CancelledError):
    """A client took too long to begin its run, or to read what it sends."""


class ForbiddenOriginError(ProgramError):
    """A web page, not a program, asks for a socket."""


class TooManySocketsError(EngineError):
    """As many sockets are open as the server takes."""


class ModelNotFoundError(ProgramError):
    """A request names a model that this server does not have."""


class MediaTypeError(ProgramError):
    """A request's body is in a form that the server does not read."""


# The nearest class in an error's own order of bases decides.
STATUS: dict[type[UmbelError], int] = {
    UmbelError: 500,
    ProgramError: 400,
    AuthenticationError: 401,
    ForbiddenOriginError: 403,
    ModelNotFoundError: 404,
    BodyTooLargeError: 413,
    MediaTypeError: 415,
    ConstraintError: 422,
    RequestRejectedError: 422,
    CancelledError: 499,
    SlowClientError: 408,
    UnsupportedFeatureError: 501,
    BackendError: 502,
    BackendConnectionError: 502,
    EngineStoppedError: 503,
    TooManySocketsError: 503,
    NodeTimeoutError: 504,
    BackendTimeoutError: 504,
}


def status_of(error: UmbelError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, RequestRejectedError) and error.reason == "queue_full":
        return 429
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return 500


def close_code_of(error: UmbelError) -> int:
    """Return the code with which an error closes a socket: 4000 more than its HTTP status."""
    return 4000 + status_of(error)
