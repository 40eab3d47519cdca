"""Records what a backend answers, run by run, and answers from the record without a model.

A record is a file of JSON lines: what the backend honours, then one line for each run that ended.
It holds the texts of the runs, so it is as private as they are; of credentials it holds none.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from umbel.lang.errors import BackendError, ProgramError, WireError, to_wire
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Join, Ref, Select, Text
from umbel.lang.results import (
    Event,
    NodeFailed,
    NodeFinished,
    NodeResult,
    NodeStarted,
    RunOptions,
    TextDelta,
)
from umbel.lang.wire import RunResponse, decode_response, encode_response

from .backends.base import Backend, Capabilities, EventSink, Session
from .credentials import clean_error

_FORMAT = 1
_to_bytes = msgspec.msgpack.Encoder(order="deterministic").encode


class _Header(msgspec.Struct, frozen=True):
    umbel_record: int
    name: str
    capabilities: Capabilities


class _RecordedRun(msgspec.Struct, frozen=True):
    row: int
    attempt: int
    keys: tuple[str, ...]  # by node
    outcomes: msgspec.Raw  # a RunResponse


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A recorded run as it is played: outcomes by key."""

    row: int
    attempt: int
    outcomes: dict[str, NodeResult | WireError]

    @classmethod
    def read(cls, line: bytes) -> _Run:
        run = msgspec.json.decode(line, type=_RecordedRun)
        response = decode_response(bytes(run.outcomes))
        by_node: dict[int, NodeResult | WireError] = {**response.results, **response.errors}
        if by_node.keys() != set(range(len(run.keys))):
            raise msgspec.ValidationError("a run in it lacks nodes")
        return cls(run.row, run.attempt, {key: by_node[i] for i, key in enumerate(run.keys)})


class _Keys:
    """Names each node of a run by its address, its operation and all that it builds on."""

    def __init__(self) -> None:
        self.by_node: list[str] = []

    def add(self, piece: RequestGraph) -> None:
        for node in piece.nodes:
            edges = (*node.deps, *(() if node.parent is None else (node.parent,)))
            parts = (node.address, node.parent is None, _without_ids(node))
            before = tuple(self.by_node[edge] for edge in edges)
            digest = hashlib.blake2b(_to_bytes((parts, before)), digest_size=12)
            self.by_node.append(digest.hexdigest())


def _without_ids(node: GraphNode) -> object:
    """Return the operation without node ids, which go by the order in which tasks wrote."""
    op = node.op
    if isinstance(op, Text):
        return Text(tuple(Ref(0) if isinstance(part, Ref) else part for part in op.parts))
    return msgspec.structs.replace(op, branches=()) if isinstance(op, Join) else op


class Recorder:
    """A backend that runs everything on another one and keeps the outcomes in a file.

    The file is written anew. A run is in it as soon as it has ended; closing the recorder closes
    its file, and not the other backend. Raises OSError when the file can't be written.
    """

    def __init__(self, backend: Backend, path: str | Path) -> None:
        self.name = backend.name
        self.capabilities = backend.capabilities
        self._backend = backend
        self._lock = threading.Lock()
        self._file = Path(path).open("wb")  # noqa: SIM115  # open for as long as the recorder is
        self._write(_Header(_FORMAT, backend.name, backend.capabilities))

    def open(self, options: RunOptions, sink: EventSink) -> Session:
        """Start a run on the other backend."""
        session = _RecordingSession(self, options, sink)
        session.inner = self._backend.open(options, session.receive)
        return session

    def stats(self) -> Mapping[str, float]:
        """Return the other backend's counters."""
        return self._backend.stats()

    def close(self) -> None:
        """Close the file; runs that have not ended are not in it. Idempotent."""
        with self._lock:
            self._file.close()

    def _write(self, line: _Header | _RecordedRun) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(msgspec.json.encode(line) + b"\n")
                self._file.flush()


class _RecordingSession:
    inner: Session

    def __init__(self, recorder: Recorder, options: RunOptions, sink: EventSink) -> None:
        self._recorder = recorder
        self._options = options
        self._sink = sink
        self._keys = _Keys()
        self._results: dict[int, NodeResult] = {}
        self._errors: dict[int, WireError] = {}
        self._is_closed = False
        self._is_written = False
        self._lock = threading.Lock()

    def extend(self, piece: RequestGraph) -> None:
        with self._lock:
            self._keys.add(piece)
        self.inner.extend(piece)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        self.inner.cancel(nodes)

    def close(self) -> None:
        self.inner.close()
        with self._lock:
            self._is_closed = True
        self._write_ended()

    def receive(self, events: Sequence[Event]) -> None:
        with self._lock:
            for event in events:
                if isinstance(event, NodeFinished):
                    self._results[event.node] = event.result
                elif isinstance(event, NodeFailed):
                    self._errors[event.node] = clean_error(event.error)
        self._write_ended()  # first: who is told that the run has ended finds it in the file
        self._sink(events)

    def _write_ended(self) -> None:
        with self._lock:
            num_ended = len(self._results) + len(self._errors)
            if self._is_written or not self._is_closed or num_ended < len(self._keys.by_node):
                return
            self._is_written = True
            outcomes = encode_response(RunResponse(self._results, self._errors))
        row, attempt = self._options.row, self._options.attempt
        keys = tuple(self._keys.by_node)
        self._recorder._write(_RecordedRun(row, attempt, keys, msgspec.Raw(outcomes)))


class ReplayBackend:
    """Answers runs from a record, at once and without a model.

    Each run takes the recorded run of its row that has most of its first nodes, every recorded run
    once. A node that was not recorded, with all that it builds on, fails with a BackendError.

    Raises OSError when the file can't be read, and ProgramError when it is no record.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        lines = self._path.read_bytes().splitlines()
        try:
            header = msgspec.json.decode(lines[0] if lines else b"", type=_Header)
            if header.umbel_record != _FORMAT:
                raise msgspec.ValidationError(f"form {header.umbel_record} is not {_FORMAT}")
            runs = [_Run.read(line) for line in lines[1:]]
        except msgspec.DecodeError as error:
            raise ProgramError(f"{self._path} is no record of runs: {error}") from None
        self.name = header.name
        self.capabilities = header.capabilities
        self._runs = runs
        self._is_closed = False
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, "umbel-replay")

    def open(self, options: RunOptions, sink: EventSink) -> Session:
        """Start a run; its events go to `sink`."""
        return _ReplaySession(self, options, sink)

    def stats(self) -> dict[str, float]:
        """Return no counters: a record has no engine."""
        return {}

    def close(self) -> None:
        """Take no more runs; nodes handed over are answered first. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._pool.shutdown()

    def _take(self, options: RunOptions, keys: Sequence[str]) -> _Run | None:
        """Return the recorded run that begins most like `keys`; it is not given again."""
        with self._lock:
            wanted = (options.row, options.attempt)
            of_row = [run for run in self._runs if (run.row, run.attempt) == wanted]
            found = max(of_row, key=lambda run: len(run.outcomes.keys() & keys), default=None)
            if found is not None:
                self._runs = [run for run in self._runs if run is not found]
            return found

    def _submit(self, session: _ReplaySession, piece: RequestGraph) -> None:
        with self._lock:
            if self._is_closed:
                raise BackendError("the replay was closed", backend=self.name)
            self._pool.submit(session.play, piece)


class _ReplaySession:
    """One run; `play` runs in the backend's thread."""

    def __init__(self, backend: ReplayBackend, options: RunOptions, sink: EventSink) -> None:
        self._backend = backend
        self._options = options
        self._sink = sink
        self._keys = _Keys()
        self._outcomes: dict[str, NodeResult | WireError] | None = None  # None: not chosen yet

    def extend(self, piece: RequestGraph) -> None:
        self._keys.add(piece)
        self._backend._submit(self, piece)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Leave nodes alone: all end at once, as they were recorded."""

    def close(self) -> None:
        """Hold nothing that could be let go."""

    def play(self, piece: RequestGraph) -> None:
        if self._outcomes is None:
            keys = [self._keys.by_node[node.id] for node in piece.nodes]
            run = self._backend._take(self._options, keys)
            self._outcomes = {} if run is None else run.outcomes
        for node in piece.nodes:
            self._sink(self._events(node, self._outcomes.get(self._keys.by_node[node.id])))

    def _events(self, node: GraphNode, outcome: NodeResult | WireError | None) -> list[Event]:
        if outcome is None:
            error = BackendError(
                f"{node.address}: {self._backend._path} holds no such node for row "
                f"{self._options.row}: the program or its arguments have changed since, or its "
                "runs are used up; record it again",
                backend=self._backend.name,
            )
            return [NodeFailed(node.id, to_wire(error))]
        if isinstance(outcome, WireError):
            return [NodeFailed(node.id, outcome)]
        events: list[Event] = []
        if isinstance(node.op, Gen | Select):
            events.append(NodeStarted(node.id))
        if isinstance(node.op, Gen) and outcome.samples and outcome.samples[0].text:
            events.append(TextDelta(node.id, outcome.samples[0].text))
        return [*events, NodeFinished(node.id, outcome)]
