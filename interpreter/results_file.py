"""The results of a batch in a file of JSON lines, so that a batch that broke off can be resumed.

The first line tells which program it is and the batch's seed; each further one is a row that has
ended, with its outcome. Lines are only ever appended; of two for one row the later holds. The file
has the texts of the runs, so it is as private as they are; of credentials it holds none.
"""

from __future__ import annotations

import fcntl
import inspect
import os
import stat
import threading
import time
import typing
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import msgspec

from umbel.lang.errors import ProgramError, WireError, to_wire
from umbel.lang.expressions import ValueExpr
from umbel.lang.run_result import Result
from umbel.lang.runner import Call
from umbel.lang.stored_state import StoredNode, StoredResult, StoredState, store_state
from umbel.lang.value_codec import check_type, decode_value, encode_value
from umbel.lang.wire import UNREADABLE, spell_floats

from .credentials import clean_error
from .interpreter import first_seed
from .stable_digest import arguments_digest, program_digest

_FORMAT = 1
# what is no file (a terminal, a pipe) is refused once it is open, and must not wait before that
_OPENING = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
_START = b'{"umbel_results":'
#: seconds after which what was written is synced to the disk with the next row
_SYNC_SECONDS = 1.0


class _Header(msgspec.Struct, frozen=True):
    umbel_results: int
    program: str
    digest: str
    seed: int


class _Row(msgspec.Struct, frozen=True, omit_defaults=True):
    row: int
    arguments: str  # their digest
    attempt: int = 0
    error: WireError | None = None
    value: Any = None  # what the body returned
    value_types: dict[str, str] = {}
    state: StoredState | None = None


class _RowStart(msgspec.Struct, frozen=True):
    row: int
    arguments: str
    error: Any = None


class _Place(NamedTuple):
    offset: int
    length: int
    arguments: str


_row_decoder = msgspec.json.Decoder(_Row, strict=False)
_start_decoder = msgspec.json.Decoder(_RowStart)


class ResultsFile:
    """An open results file: finds rows that have finished, and takes those that end.

    A thread of its own writes, so that neither an event loop nor a backend waits for a disk. A row
    is handed to the system as one write when it ends; a killed process loses none that was saved.
    Each second, and at the end, the disk is synced.

    Raises ProgramError when the file is in use, is of another program or seed, or is no such file
    (nor any that can be read back), OSError when it can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str], call: Call) -> None:
        self._path = os.fspath(path)
        _check_return_type(call)
        header = _Header(_FORMAT, _program_name(call), program_digest(call), first_seed(call))
        self._fd = os.open(self._path, _OPENING, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ProgramError(
                    f"{self._path} is no file that can be read back and added to (but a device or "
                    "a pipe): use a path of an ordinary file"
                )
            self._lock_file()
            self._places: dict[int, _Place] = {}  # finished rows
            self._size = self._read_index()
            self.seed = self._check_header(header, call.settings.seed)
        except BaseException:
            os.close(self._fd)
            raise
        self.exprs = StorableExprs()  # for the runs of the batch
        self._arguments: dict[int, str] = {}  # digests of rows that were looked for
        self._writer = ThreadPoolExecutor(1, "umbel-results")
        self._lock = threading.Lock()
        self._is_closed = False
        self._synced = time.monotonic()

    def finished(self, row: int, call: Call) -> Result[Any] | None:
        """Return the stored result of a row that has finished; None for one that has to run.

        Raises ProgramError when the row that finished had other arguments, or can't be read.
        """
        digest = arguments_digest(call)
        place = self._places.get(row)
        if place is None:
            self._arguments[row] = digest
            return None
        if place.arguments != digest:
            raise ProgramError(
                f"row {row} of the batch is not the row {row} that {self._path} has finished: its "
                "arguments differ. Keep finished rows as they were and where they were (add new "
                "ones at the end), or use another file"
            )
        line = os.pread(self._fd, place.length, place.offset)
        try:
            stored = _row_decoder.decode(line)
            assert stored.state is not None, "a row that finished has a state"
            return StoredResult(
                stored.state,
                decode_value(stored.value, "/value", stored.value_types),
                row=row,
                seed=self.seed,
                attempt=stored.attempt,
                defaults=call.settings.sampling,
            )
        except (*UNREADABLE, ProgramError) as error:
            raise ProgramError(
                f"row {row} can't be read back from {self._path}: {error}; where a class has "
                "changed, use another file"
            ) from error

    def save(self, result: Result[Any]) -> Future[None]:
        """Write a row that was looked for and has ended; after `close` do nothing.

        The future raises ProgramError for a value that has no form in the file, OSError where it
        can't be written.
        """
        with self._lock:
            if not self._is_closed:
                return self._writer.submit(self._write, result)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Write what was given to `save`, sync, and let go of the file. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._writer.shutdown()
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    # --- writing, in the writer's thread -----------------------------------------------------

    def _write(self, result: Result[Any]) -> None:
        digest = self._arguments.pop(result.row)
        line = _line(result, digest)
        self._append(line)
        if result.error is None:  # after the whole line: what is known of is there
            self._places[result.row] = _Place(self._size - len(line), len(line), digest)
        if time.monotonic() - self._synced >= _SYNC_SECONDS:
            os.fsync(self._fd)
            self._synced = time.monotonic()

    def _append(self, line: bytes) -> None:
        try:
            left = memoryview(line)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            os.ftruncate(self._fd, self._size)  # no half line in the middle of the file
            raise
        self._size += len(line)

    # --- opening -----------------------------------------------------------------------------

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ProgramError(
                f"{self._path} is in use by another batch: wait for its end, or use another file"
            ) from None

    def _read_index(self) -> int:
        """Note where finished rows are; drop a last line that was cut; return the file's size."""
        self._header: _Header | None = None
        offset = 0
        with open(os.dup(self._fd), "rb") as file:
            for number, line in enumerate(file):
                if not line.endswith(b"\n"):  # a crash cut it while it was written
                    if number == 0 and not _START.startswith(line[: len(_START)]):
                        self._refuse_file("its first line is not of that form")
                    os.ftruncate(self._fd, offset)
                    break
                try:
                    self._note(number, line, offset)
                except UNREADABLE as error:
                    self._refuse_file(f"line {number + 1}: {error}")
                offset += len(line)
        return offset

    def _note(self, number: int, line: bytes, offset: int) -> None:
        if number == 0:
            self._header = msgspec.json.decode(line, type=_Header)
            return
        start = _start_decoder.decode(line)
        if start.error is None:
            self._places[start.row] = _Place(offset, len(line), start.arguments)

    def _check_header(self, header: _Header, seed: int | None) -> int:
        """Check what the file is of, or begin it; return the batch's seed."""
        found = self._header
        if found is None:
            self._append(msgspec.json.encode(header) + b"\n")
            os.fsync(self._fd)
            return header.seed
        if found.umbel_results != _FORMAT:
            self._refuse_file(f"its form is {found.umbel_results}, this version has {_FORMAT}")
        if (found.program, found.digest) != (header.program, header.digest):
            raise ProgramError(
                f"{self._path} has rows of {found.program} ({found.digest}), not of "
                f"{header.program} as it is now ({header.digest}): use another file; or, to keep "
                "the rows although the program has changed, write the new name and digest into "
                "the file's first line"
            )
        if seed is not None and seed != found.seed:
            raise ProgramError(
                f"{self._path} was begun with seed {found.seed}, not {seed}: use another file"
            )
        return found.seed

    def _refuse_file(self, why: str) -> NoReturn:
        raise ProgramError(f"{self._path} is no file of results, or was damaged: {why}")


class StorableExprs(dict[int, ValueExpr[Any]]):
    """Refuses a gen whose value could not be stored, on the line that appends it; keeps none."""

    def __init__(self) -> None:
        self._checked: dict[int, object] = {}  # kept, so that no other type gets its identity

    def __setitem__(self, node: int, expr: ValueExpr[Any]) -> None:
        if expr.decode is None or id(expr.schema) in self._checked:
            return
        try:
            check_type(expr.schema)
        except ProgramError as error:
            raise ProgramError(f"{expr!r} can't be kept in a results file: {error}") from None
        if isinstance(expr.schema, type):
            self._checked[id(expr.schema)] = expr.schema


def _line(result: Result[Any], digest: str) -> bytes:
    if result.error is not None:
        error = clean_error(to_wire(result.error))
        row = _Row(result.row, digest, result.attempt, error)
    else:
        assert result.state is not None, "a row without an error has a state"
        types: dict[str, str] = {}
        try:
            value = encode_value(result.value, "/value", types)
            state = _cleaned(store_state(result.state))
        except ProgramError as error:
            raise ProgramError(
                f"row {result.row} can't be kept in a results file: {error}"
            ) from None
        row = _Row(result.row, digest, result.attempt, None, value, types, state)
    try:
        return msgspec.json.encode(spell_floats(msgspec.to_builtins(row, str_keys=True))) + b"\n"
    except UnicodeEncodeError as error:
        raise ProgramError(
            f"row {result.row} can't be kept in a results file: its text is not Unicode: {error}"
        ) from None


def _cleaned(state: StoredState) -> StoredState:
    """Return a state without what services said that looks like a credential."""

    def clean(node: StoredNode) -> StoredNode:
        error, result = node.error and clean_error(node.error), node.result
        if result is not None and result.branch_errors:
            errors = tuple(e and clean_error(e) for e in result.branch_errors)
            result = msgspec.structs.replace(result, branch_errors=errors)
        return StoredNode(node.node, result, error)

    return msgspec.structs.replace(state, nodes=tuple(map(clean, state.nodes)))


def _check_return_type(call: Call) -> None:
    """Refuse a program that says it returns what could not be stored."""
    try:
        hint = typing.get_type_hints(inspect.unwrap(call.body)).get("return")
    except (NameError, TypeError):  # names that only a type checker sees, objects without hints
        return
    try:
        check_type(hint)
    except ProgramError as error:
        name = _program_name(call)
        raise ProgramError(
            f"what {name} returns can't be kept in a results file: {error}"
        ) from None


def _program_name(call: Call) -> str:
    body = inspect.unwrap(call.body)
    named = body if isinstance(body, type) or inspect.isroutine(body) else type(body)
    return f"{named.__module__}:{named.__qualname__}"
