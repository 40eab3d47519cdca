"""Records what a backend answers, run by run, and answers from the record without a model.

A record is a file of JSON lines: what the backend honours, then one line for each run that ended,
with its options, its nodes and its events in their order. It holds the texts of the runs, so it is
as private as they are; of credentials it holds none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from umbel.lang.errors import (
    BackendError,
    GenerationError,
    ProgramError,
    UmbelError,
    to_wire,
)
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Join, Ref, Text
from umbel.lang.plan import counted
from umbel.lang.results import Event, NodeFailed, NodeFinished, RunOptions
from umbel.lang.wire import UNREADABLE, decode_event, encode_event, spell_floats

from .backends.base import Backend, Capabilities, EventSink, Session, TokenCounter
from .credentials import clean_error
from .passes import open_session
from .replay_difference import difference

_FORMAT = 1
_node_decoder = msgspec.json.Decoder(GraphNode, strict=False)
_to_bytes = msgspec.msgpack.Encoder(order="deterministic").encode


class _Header(msgspec.Struct, frozen=True):
    umbel_record: int
    name: str
    capabilities: Capabilities


class _RecordedRun(msgspec.Struct, frozen=True):
    options: RunOptions
    nodes: tuple[msgspec.Raw, ...]  # GraphNode
    cancelled: tuple[int, ...]  # by the program, one by one
    events: tuple[msgspec.Raw, ...]  # Event


class _Keys:
    """Names each node of a run by its address, its operation and all that it builds on."""

    def __init__(self) -> None:
        self.by_node: list[str] = []

    def add(self, nodes: Iterable[GraphNode]) -> None:
        for node in nodes:
            parts = (node.address, node.parent is None, _without_ids(node))
            before = tuple(self.by_node[edge] for edge in _edges(node))
            digest = hashlib.blake2b(_to_bytes((parts, before)), digest_size=12)
            self.by_node.append(digest.hexdigest())


def _without_ids(node: GraphNode) -> object:
    """Return the operation without node ids, which go by the order in which tasks wrote."""
    op = node.op
    if isinstance(op, Text):
        return Text(tuple(Ref(0) if isinstance(part, Ref) else part for part in op.parts))
    return msgspec.structs.replace(op, branches=()) if isinstance(op, Join) else op


def _edges(node: GraphNode) -> tuple[int, ...]:
    return node.deps if node.parent is None else (*node.deps, node.parent)


class _Run:
    """A recorded run as it is played: what happened to each node, by key.

    `cancelled` are the nodes that ended since the program cancelled them.
    """

    def __init__(
        self, nodes: Sequence[GraphNode], cancelled: Set[int], events: Sequence[Event]
    ) -> None:
        keys = _Keys()
        keys.add(nodes)
        self.nodes = nodes
        self.by_address = {node.address: node for node in nodes}
        self.events: dict[str, list[tuple[int, Event]]] = defaultdict(list)  # with their places
        self.cancelled: set[str] = set()
        ended: set[int] = set()
        for place, event in enumerate(events):
            key = keys.by_node[event.node]
            self.events[key].append((place, event))
            if isinstance(event, NodeFinished | NodeFailed):
                ended.add(event.node)
            if isinstance(event, NodeFailed) and event.node in cancelled:
                self.cancelled.add(key)
        if len(ended) < len(nodes):
            raise msgspec.ValidationError("a run in it lacks the ends of nodes")


class Recorder:
    """A backend that runs everything on another one and keeps what happened in a file.

    The file is written anew. A run is in it as soon as it has ended; closing the recorder closes
    its file, and not the other backend. Raises OSError when the file can't be written.
    """

    def __init__(self, backend: Backend, path: str | Path) -> None:
        self.name = backend.name
        # a record is of what the program wrote: how passes cut it may depend on time
        self.capabilities = dataclasses.replace(backend.capabilities, verbatim=True)
        self.token_counter = backend.token_counter
        self._backend = backend
        self._lock = threading.Lock()
        self._file = Path(path).open("wb")  # noqa: SIM115  # open for as long as the recorder is
        self._write(_Header(_FORMAT, backend.name, backend.capabilities))

    def open(self, options: RunOptions, sink: EventSink) -> Session:
        """Start a run on the other backend."""
        session = _RecordingSession(self, options, sink)
        session.inner = open_session(self._backend, options, session.receive)
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
        self._nodes: list[msgspec.Raw] = []
        self._cancelled: set[int] = set()
        self._events: list[Event] = []
        self._num_ended = 0
        self._is_closed = False
        self._is_done = False  # written, or left out since it can't be
        self._lock = threading.Lock()

    def extend(self, piece: RequestGraph) -> None:
        try:
            nodes = [_to_json(node) for node in piece.nodes]
        except UnicodeEncodeError:
            self._is_done = True
            raise
        with self._lock:
            self._nodes += nodes
        try:
            self.inner.extend(piece)
        except UmbelError as error:
            refused = to_wire(error)
            self._keep([NodeFailed(node.id, refused) for node in piece.nodes])
            raise

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        with self._lock:
            self._cancelled.update(nodes or ())
        self.inner.cancel(nodes)

    def close(self) -> None:
        self.inner.close()
        with self._lock:
            self._is_closed = True
        self._write_ended()

    def receive(self, events: Sequence[Event]) -> None:
        self._keep(events)
        self._write_ended()  # first: who is told that the run has ended finds it in the file
        self._sink(events)

    def _keep(self, events: Sequence[Event]) -> None:
        with self._lock:
            self._events += events
            self._num_ended += sum(isinstance(e, NodeFinished | NodeFailed) for e in events)

    def _write_ended(self) -> None:
        with self._lock:
            if self._is_done or not self._is_closed or self._num_ended < len(self._nodes):
                return
            self._is_done = True
            events = tuple(msgspec.Raw(encode_event(_clean(event))) for event in self._events)
            cancelled = tuple(sorted(self._cancelled))
            run = _RecordedRun(self._options, tuple(self._nodes), cancelled, events)
        self._recorder._write(run)


def _to_json(node: GraphNode) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(spell_floats(msgspec.to_builtins(node))))


def _clean(event: Event) -> Event:
    if isinstance(event, NodeFailed):
        return NodeFailed(event.node, clean_error(event.error))
    if isinstance(event, NodeFinished) and event.result.branch_errors:
        errors = tuple(e and clean_error(e) for e in event.result.branch_errors)
        return NodeFinished(event.node, msgspec.structs.replace(event.result, branch_errors=errors))
    return event


class ReplayBackend:
    """Answers runs from a record, at once and without a model.

    Each run takes the recorded run of its row that has most of its first nodes, every recorded run
    once. A node that was not recorded as it is fails with a BackendError that says what differs,
    and poisons what builds on it. What a program cancelled ends when it cancels it again, or after
    `patience` seconds. The last line is left out where it was not written to its end.

    Raises OSError when the file can't be read, and ProgramError when it is no record.
    """

    token_counter: TokenCounter | None = None

    def __init__(self, path: str | Path, *, patience: float = 10.0) -> None:
        self._path = Path(path)
        *lines, _ = self._path.read_bytes().split(b"\n")
        self._runs: dict[tuple[int, int], list[_Run]] = defaultdict(list)  # by row and attempt
        try:
            header = msgspec.json.decode(lines[0] if lines else b"", type=_Header)
            if header.umbel_record != _FORMAT:
                raise msgspec.ValidationError(f"form {header.umbel_record} is not {_FORMAT}")
            for line in lines[1:]:
                options, run = _read_run(line)
                self._runs[options.row, options.attempt].append(run)
        except (*UNREADABLE, ProgramError) as error:
            raise ProgramError(f"{self._path} is no record of runs: {error}") from None
        self._num_recorded = {key: len(runs) for key, runs in self._runs.items()}
        self.name = header.name
        self.capabilities = dataclasses.replace(header.capabilities, verbatim=True)
        self._patience = patience
        self._is_closed = False
        self._waiting: set[_ReplaySession] = set()  # for the program to cancel something
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
            if not self._is_closed:
                for session in self._waiting:
                    self._pool.submit(session.release)
            self._is_closed = True
        self._pool.shutdown()

    def _take(self, options: RunOptions, keys: Sequence[str]) -> _Run | None:
        """Return the recorded run that begins most like `keys`; it is not given again."""
        with self._lock:
            of_row = self._runs.get((options.row, options.attempt), [])
            found = max(of_row, key=lambda run: len(run.events.keys() & keys), default=None)
            if found is not None:
                of_row.remove(found)
            return found

    def _submit(self, work: Callable[[], None]) -> bool:
        """Do something in the backend's thread; False after `close`."""
        with self._lock:
            if not self._is_closed:
                self._pool.submit(work)
            return not self._is_closed

    def _wait(self, session: _ReplaySession, is_waiting: bool) -> bool:
        """Note whether a session waits for its program; False when it must not, after `close`."""
        with self._lock:
            if is_waiting and not self._is_closed:
                self._waiting.add(session)
            else:
                self._waiting.discard(session)
            return not self._is_closed


class _Held(NamedTuple):
    """What happened to a node that the program cancelled, or to one that builds on such a node."""

    happened: Sequence[tuple[float, Event]]
    edges: tuple[int, ...]
    is_cancelled: bool


class _ReplaySession:
    """One run; `play` and `release` run in the backend's thread."""

    def __init__(self, backend: ReplayBackend, options: RunOptions, sink: EventSink) -> None:
        self._backend = backend
        self._options = options
        self._sink = sink
        self._keys = _Keys()
        self._nodes: list[GraphNode] = []
        self._run: _Run | None = None
        self._wrong: dict[int, tuple[str, BackendError]] = {}  # with the address where it began
        self._held: dict[int, _Held] = {}
        self._timer: threading.Timer | None = None

    def extend(self, piece: RequestGraph) -> None:
        self._keys.add(piece.nodes)
        if not self._backend._submit(lambda: self.play(piece)):
            raise BackendError("the replay was closed", backend=self._backend.name)

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        self._backend._submit(lambda: self.release(nodes))

    def close(self) -> None:
        """End what the program cancelled before, and now has left alone."""
        self._backend._submit(self.release)

    def play(self, piece: RequestGraph) -> None:
        """Answer nodes as they were answered before."""
        keys = self._keys.by_node
        if not self._nodes:
            first = [keys[node.id] for node in piece.nodes]
            self._run = self._backend._take(self._options, first)
        self._nodes += piece.nodes
        happened: list[tuple[float, Event]] = []
        for node in piece.nodes:
            recorded = None if self._run is None else self._run.events.get(keys[node.id])
            edges = _edges(node)
            wrong = next((edge for edge in edges if edge in self._wrong), None)
            if wrong is not None:
                self._wrong[node.id] = self._wrong[wrong]
                address, cause = self._wrong[wrong]
                error = GenerationError(f"{address} failed: {cause}", address=address)
                error.__cause__ = cause
                happened.append((math.inf, NodeFailed(node.id, to_wire(error))))
            elif self._run is None or recorded is None:
                unknown = BackendError(self._unknown(node), backend=self._backend.name)
                self._wrong[node.id] = (node.address, unknown)
                happened.append((math.inf, NodeFailed(node.id, to_wire(unknown))))
            else:
                own = [(place, _renumbered(event, node.id)) for place, event in recorded]
                is_cancelled = keys[node.id] in self._run.cancelled
                if is_cancelled or any(edge in self._held for edge in edges):
                    self._held[node.id] = _Held(own, edges, is_cancelled)
                else:
                    happened += own
        self._deliver(happened)
        if self._held and not self._backend._wait(self, True):
            self.release()
        elif self._held and self._timer is None:
            self._timer = threading.Timer(self._backend._patience, self.cancel)
            self._timer.daemon = True
            self._timer.start()

    def release(self, nodes: Sequence[int] | None = None) -> None:
        """End held nodes (all, by default), and those held only since they build on these."""
        happened: list[tuple[float, Event]] = []
        for node in [*self._held] if nodes is None else nodes:
            if node in self._held:
                happened += self._held.pop(node).happened
        for node, held in [*self._held.items()]:
            if not held.is_cancelled and self._held.keys().isdisjoint(held.edges):
                happened += self._held.pop(node).happened
        if not self._held:
            self._backend._wait(self, False)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        self._deliver(happened)

    def _deliver(self, happened: list[tuple[float, Event]]) -> None:
        if happened:
            happened.sort(key=lambda placed: placed[0])
            self._sink([event for _, event in happened])

    def _unknown(self, node: GraphNode) -> str:
        path, row = self._backend._path, self._options.row
        if self._run is None:
            attempt = self._options.attempt
            num_recorded = self._backend._num_recorded.get((row, attempt), 0)
            which = f"row {row}" + (f", attempt {attempt}" if attempt else "")
            if num_recorded == 0:
                return f"{node.address}: {path} has no run of {which} that ended; record it again"
            return (
                f"{node.address}: {path} has {counted(num_recorded, 'run')} of {which}, and each "
                "is played once: open the record again with umbel.replay, or record more runs"
            )
        recorded = self._run.by_address.get(node.address)
        if recorded is None:
            found = "nothing was recorded there"
        else:
            found = difference(node, self._nodes, recorded, self._run.nodes)
        return f"{node.address} is not as it was recorded in {path}: {found}; record it again"


def _renumbered(event: Event, node: int) -> Event:
    return msgspec.structs.replace(event, node=node)


def _read_run(line: bytes) -> tuple[RunOptions, _Run]:
    recorded = msgspec.json.decode(line, type=_RecordedRun)
    nodes = tuple(_node_decoder.decode(node) for node in recorded.nodes)
    RequestGraph(nodes).check()
    events = [decode_event(bytes(event)) for event in recorded.events]
    if any(not 0 <= event.node < len(nodes) for event in events):
        raise msgspec.ValidationError("a run in it has events of nodes that it lacks")
    return recorded.options, _Run(nodes, frozenset(recorded.cancelled), events)
