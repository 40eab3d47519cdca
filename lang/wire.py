"""What an umbel server and its clients say to each other; knows no transport.

A whole graph is one `RunRequest`. A graph that grows goes over a socket, piece by piece, as the
messages of `ClientMessage`, which `ServerMessage` answer (docs/server.md says in which order).
Where there is no socket, each piece is a `RunRequest` of its own: the client sends the next nodes
together with the ones they build on, whose outcomes it got before (`resolved`, `failed`). The
server takes these as done; its prefix cache makes that cheap.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from .errors import ProgramError, WireError
from .graph import GraphNode, RequestGraph
from .results import Event, NodeFailed, NodeFinished, NodeResult, NodeStarted, RunOptions, TextDelta

PROGRAMS_PATH = "/v1/programs"
SOCKET_PATH = "/v1/programs/socket"
SOCKET_VERSION = 1  # of the messages on a socket
MODEL_PATH = "/v1/model"
STATS_PATH = "/v1/stats"
MSGPACK = "application/msgpack"
JSON = "application/json"
EVENT_STREAM = "text/event-stream"


class RunRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A graph to run. Nodes in `resolved` and `failed` have ended before and are not run again.

    `run_id` is the client's name for the run, by which it may cancel single nodes.
    """

    graph: RequestGraph
    options: RunOptions = RunOptions()
    resolved: dict[int, NodeResult] = {}
    failed: dict[int, WireError] = {}
    run_id: str = ""

    def check(self) -> None:
        """Raise ProgramError unless the graph is whole and what has ended fits it."""
        if self.graph.base != 0:
            raise ProgramError(
                f"the graph starts at node {self.graph.base}: send the nodes before it too, "
                "with their results in 'resolved'"
            )
        self.graph.check()
        nodes = self.graph.nodes
        for node_id in (*self.resolved, *self.failed):
            if not 0 <= node_id < len(nodes):
                raise ProgramError(f"node {node_id} has ended but is not in the graph")
        for node_id in self.resolved:
            if node_id in self.failed:
                raise ProgramError(f"node {node_id} is both resolved and failed")
            for edge in _edges(nodes[node_id]):
                if edge not in self.resolved and edge not in self.failed:
                    raise ProgramError(
                        f"node {node_id} is resolved but node {edge}, which it builds on, is not"
                    )

    def open_nodes(self) -> set[int]:
        """Return the nodes that are to be run."""
        return set(range(len(self.graph.nodes))) - self.resolved.keys() - self.failed.keys()


class RunResponse(msgspec.Struct, frozen=True):
    """The outcomes of a run's nodes: each is in one of the two."""

    results: dict[int, NodeResult]
    errors: dict[int, WireError]


class CancelRequest(msgspec.Struct, frozen=True):
    """Nodes of a running run that are no longer wanted."""

    nodes: tuple[int, ...]


class ErrorResponse(msgspec.Struct, frozen=True):
    """The body of every answer whose status is not success."""

    error: WireError


class ModelInfo(msgspec.Struct, frozen=True):
    """What a server runs, and what it honours (the fields of a backend's Capabilities).

    `socket_versions` are the forms of a socket's messages that it speaks: none on servers that
    have no socket. `max_body_bytes` is the longest body or message that it takes; 0: it didn't say.
    """

    name: str
    capabilities: dict[str, Any]
    version: str = ""
    socket_versions: tuple[int, ...] = ()
    max_body_bytes: int = 0


class OpenRun(msgspec.Struct, frozen=True, tag="open"):
    """The first message of a socket: begins its run."""

    version: int
    options: RunOptions = RunOptions()


class ExtendRun(msgspec.Struct, frozen=True, omit_defaults=True, tag="extend"):
    """More of the run's graph. Nodes in `failed` have ended at the client and are not run.

    What such a node was does not matter: it comes as an empty text, so that ids stay in order.
    """

    graph: RequestGraph
    failed: dict[int, WireError] = {}


class CancelNodes(msgspec.Struct, frozen=True, tag="cancel"):
    """Nodes that are no longer wanted; without `nodes`, all that have not ended."""

    nodes: tuple[int, ...] | None = None


class CloseRun(msgspec.Struct, frozen=True, tag="close"):
    """No more pieces come: the server closes the socket when every node has ended."""


ClientMessage = OpenRun | ExtendRun | CancelNodes | CloseRun


class RunEvents(msgspec.Struct, frozen=True, tag="events"):
    """What happened, in its order; nothing after a while in which nothing did."""

    events: tuple[Event, ...]


class RunRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Why the server ends the run: its last message."""

    error: WireError


ServerMessage = RunEvents | RunRefused


#: what decoders raise for bytes that are not what they should be; too many brackets are a
#: RecursionError
#: and encoders, for text that is not Unicode and for numbers of more than 64 bits
UNWRITABLE = (UnicodeEncodeError, OverflowError, RecursionError)
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_event_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(
    NodeStarted | TextDelta | NodeFinished | NodeFailed, strict=False
)
_response_decoder = msgspec.json.Decoder(RunResponse, strict=False)
_client_message: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
    OpenRun | ExtendRun | CancelNodes | CloseRun
)
_server_message: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(
    RunEvents | RunRefused
)
_request_msgpack = msgspec.msgpack.Decoder(RunRequest)
_request_json = msgspec.json.Decoder(RunRequest, strict=False)


def encode_event(event: Event) -> bytes:
    """Write one event as JSON. Floats that JSON lacks are written as "inf", "-inf", "nan"."""
    if isinstance(event, NodeFinished) and _has_floats(event.result):
        return msgspec.json.encode(spell_floats(msgspec.to_builtins(event)))
    return msgspec.json.encode(event)


def decode_event(data: bytes) -> Event:
    """Read what `encode_event` wrote; raises one of `UNREADABLE`."""
    return _event_decoder.decode(data)


def encode_response(response: RunResponse) -> bytes:
    """Write a run's outcomes as JSON, with floats as in `encode_event`."""
    if any(_has_floats(result) for result in response.results.values()):
        return msgspec.json.encode(spell_floats(msgspec.to_builtins(response)))
    return msgspec.json.encode(response)


def decode_response(data: bytes) -> RunResponse:
    """Read what `encode_response` wrote; raises one of `UNREADABLE`."""
    return _response_decoder.decode(data)


def encode_request(request: RunRequest) -> bytes:
    """Write a request as msgpack; raises one of `UNWRITABLE`."""
    return msgspec.msgpack.encode(request)


def decode_request(data: bytes, media_type: str = MSGPACK) -> RunRequest:
    """Read a request and check it; raises ProgramError."""
    try:
        decoder = _request_json if media_type == JSON else _request_msgpack
        request = decoder.decode(data)
    except UNREADABLE as error:
        raise ProgramError(f"the body is not a run: {error}") from None
    request.check()
    return request


def encode_message(message: ClientMessage | ServerMessage) -> bytes:
    """Write a socket's message; raises one of `UNWRITABLE`."""
    return msgspec.msgpack.encode(message)


def decode_client_message(data: bytes) -> ClientMessage:
    """Read what a client sent and check it; raises ProgramError."""
    try:
        message = _client_message.decode(data)
    except UNREADABLE as error:
        raise ProgramError(f"this is no message of a run: {error}") from None
    if isinstance(message, ExtendRun):
        graph = message.graph
        graph.check()
        for node_id in message.failed:
            if not graph.base <= node_id < graph.base + len(graph.nodes):
                raise ProgramError(f"node {node_id} has failed but is not in the piece")
    return message


def decode_server_message(data: bytes) -> ServerMessage:
    """Read what a server sent; raises one of `UNREADABLE`."""
    return _server_message.decode(data)


def _edges(node: GraphNode) -> tuple[int, ...]:
    return node.deps if node.parent is None else (*node.deps, node.parent)


def _has_floats(result: NodeResult) -> bool:
    """Whether a result holds log-probabilities, which may be infinite."""
    return bool(result.scores) or any(s.logprobs or s.prompt_logprobs for s in result.samples)


def spell_floats(value: Any) -> Any:
    """Return builtins with the floats that JSON lacks as strings; a lax decoder reads them back."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: spell_floats(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_floats(item) for item in value]
    return value
