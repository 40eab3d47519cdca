"""What goes wrong between a client and its server, as errors that say what to do; asks nobody."""

from __future__ import annotations

import httpx
import msgspec

from umbel.lang.errors import (
    BackendConnectionError,
    BackendError,
    BackendStatusError,
    BackendTimeoutError,
    BodyTooLargeError,
    ProgramError,
    UmbelError,
    from_wire,
    to_wire,
)
from umbel.lang.graph import GraphNode
from umbel.lang.wire import UNREADABLE, ErrorResponse

BACKEND = "remote"


def for_node(error: UmbelError, node: GraphNode) -> UmbelError:
    """Return the error of one node for what befell its whole run: the same, with its name."""
    wire = to_wire(error)
    return from_wire(msgspec.structs.replace(wire, message=f"{node.label}: {wire.message}"))


def status_error(url: str, status_code: int, body: bytes) -> UmbelError:
    """Return the server's own error, or one that names the status."""
    try:
        return from_wire(msgspec.json.decode(body, type=ErrorResponse).error)
    except UNREADABLE:
        text = body[:200].decode("utf-8", "replace")
    return BackendStatusError(
        f"{url} answered {status_code}: {text}",
        backend=BACKEND,
        retryable=status_code in (429, 502, 503, 504),
        status_code=status_code,
    )


def transport_error(url: str, error: Exception) -> BackendError:
    """Return what to raise for an error of httpx."""
    what = str(error) or type(error).__name__
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout):
        return silence(url, what)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.InvalidURL):
        return unreachable(url, what)
    return broken(url, what)


def silence(url: str, what: str) -> BackendTimeoutError:
    """Return the error of a server that says nothing, not even that it still works."""
    return BackendTimeoutError(
        f"{url} fell silent ({what}): is it overloaded, or gone?", backend=BACKEND, retryable=True
    )


def unreachable(url: str, what: str) -> BackendConnectionError:
    """Return the error of a server that is not there."""
    return BackendConnectionError(
        f"can't connect to {url} ({what}): start one with `umbel serve MODEL`",
        backend=BACKEND,
        retryable=True,
    )


def broken(url: str, what: str) -> BackendConnectionError:
    """Return the error of a connection that ended before its run."""
    return BackendConnectionError(
        f"the connection to {url} broke: {what}", backend=BACKEND, retryable=True
    )


def too_large(url: str, num_bytes: int, limit: int) -> BodyTooLargeError:
    """Return the error of a piece that the server would not take; it is not sent."""
    return BodyTooLargeError(
        f"this piece of the run is {num_bytes:,} bytes as it is sent, and {url} takes {limit:,}: "
        "send less text at once, or raise the server's max_body_bytes"
    )


def unsendable(error: Exception) -> ProgramError:
    """Return the error of what has no form on the wire: see `lang.wire.UNWRITABLE`."""
    if isinstance(error, UnicodeEncodeError):
        return ProgramError(f"the program's text can't be sent, it is not Unicode: {error}")
    return ProgramError(f"the program can't be sent: {error}")


def not_an_event(url: str, error: Exception) -> BackendError:
    """Return the error of a server that sent something unknown."""
    return BackendError(
        f"{url} sent what is not an event ({error}): is it the same version of umbel?",
        backend=BACKEND,
    )
