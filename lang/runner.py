"""What the language asks of whoever runs it; knows no backend and runs nothing.

A `Run` is one execution of a program as its states see it; a `Runner` makes them. The current
runner is a context variable over one process-wide default, so that the language needs no edge to
the interpreter.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .errors import BackendError, ProgramError, UmbelError, causes_of
from .graph import GraphNode
from .ir import Op
from .number_checks import MAX_SECONDS, check_seconds, check_whole
from .results import NodeResult
from .sampling_params import SamplingParams
from .suggestions import nearest

if TYPE_CHECKING:
    from .expressions import ValueExpr
    from .plan import Plan
    from .run_result import Result
    from .state import State
    from .streaming import AsyncStream, Stream

OnError = Literal["raise", "collect"]


class Run(Protocol):
    """One execution: a growing list of nodes and their outcomes."""

    @property
    def nodes(self) -> Sequence[GraphNode]:
        """All nodes recorded so far; a node's id is its index."""
        ...

    @property
    def exprs(self) -> dict[int, ValueExpr[Any]] | None:
        """The expressions of gens and selects by node, if anyone wants to know them."""
        ...

    def add(self, op: Op, address: str, parent: int | None) -> int:
        """Record a node and return its id; nothing runs yet.

        Raises GenerationError when the parent is known to have failed, and
        UnsupportedFeatureError when the backend can't honour the operation.
        """
        ...

    def result(self, node: int) -> NodeResult:
        """Hand over what is recorded, wait for a node and return its result.

        Raises GenerationError (the cause chained) when the node failed, and ProgramError where
        waiting would block an event loop.
        """
        ...

    async def aresult(self, node: int) -> NodeResult:
        """Do the same without blocking the event loop."""
        ...

    def failure(self, node: int) -> UmbelError | None:
        """Return the error of a node that has failed; None if it has not (yet). Never waits."""
        ...

    def cancel(self, nodes: Sequence[int]) -> None:
        """Stop nodes that have not ended; they fail with CancelledError at once."""
        ...


def check_backend(backend: object) -> None:
    """Refuse with a TypeError what can't run programs, above all a model's name."""
    if isinstance(backend, str):
        raise TypeError(
            f"{backend!r} is a name, not a backend: open it with umbel.connect({backend!r})"
        )
    if not callable(getattr(backend, "open", None)) or not hasattr(backend, "capabilities"):
        raise TypeError(f"{backend!r} is no backend: make one with umbel.connect(...)")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `Program.options` sets; None leaves a choice to the runner."""

    backend: object | None = None
    seed: int | None = None
    sampling: SamplingParams | None = None
    timeout: float | None = None


OPTION_NAMES = tuple(each.name for each in fields(Settings))


def option_hint(name: str) -> str:
    """Return where to say what is no argument of a program but how it runs; else empty."""
    if name in OPTION_NAMES:
        return f"how a program runs is set before, with options({name}=...)"
    if name in SamplingParams.__struct_fields__:
        return f"how gens sample is set before, with options(sampling={{{name!r}: ...}})"
    return ""


@dataclass(frozen=True, slots=True)
class Call:
    """A program's body with its arguments. The state goes between `prefix` and `args`."""

    body: Callable[..., Any]
    is_async: bool
    prefix: tuple[Any, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    settings: Settings = Settings()
    row: int | None = None  # in a batch

    def start(self, state: State) -> Any:
        """Call the body, and return what it returns: of an `async def` one the coroutine.

        Raises what the body raises; for arguments that it does not take a TypeError that says
        which, of which row, and what it takes.
        """
        try:
            return self.body(*self.prefix, state, *self.args, **self.kwargs)
        except TypeError as error:
            trace = error.__traceback__
            # further frames are the body's own: it was called, so its arguments fit
            if trace is not None and trace.tb_next is None and (why := self._misfit()):
                raise TypeError(why) from None
            raise

    def _misfit(self) -> str:
        """Return why the arguments don't fit the body's parameters; empty if they do."""
        signature = inspect.signature(self.body)
        after = list(signature.parameters.values())[len(self.prefix) + 1 :]
        known = [p.name for p in after if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in after)
        unknown = [name for name in self.kwargs if name not in known and not takes_any]
        hint = option_hint(unknown[0]) if unknown else ""
        if unknown and (hint or known):
            why = f"has no parameter {unknown[0]!r}: {hint or nearest(unknown[0], known)}"
        else:
            try:
                signature.bind(*self.prefix, None, *self.args, **self.kwargs)
            except TypeError as error:
                why = f"can't be called so: {error}"
            else:
                return ""
        where = "" if self.row is None else f"row {self.row} of the batch: "
        takes = ", ".join(str(p.replace(annotation=p.empty)) for p in after)
        return f"{where}{self.body.__name__} {why} (its parameters: {takes or 'none'})"


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How a batch is run; see `Program.run_batch`."""

    max_in_flight: int = 512
    progress: bool | None = None
    on_error: OnError = "raise"
    ordered: bool = True
    total: int | None = None  # number of rows, where it is known
    retries: int = 0
    backoff: float = 0.5  # seconds before the first retry; doubles with each further one
    results_file: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""
        check_whole("max_in_flight", self.max_in_flight, least=1)
        check_whole("retries", self.retries, least=0)
        check_seconds("backoff", self.backoff)
        if not 0 <= self.backoff <= MAX_SECONDS:
            raise ValueError(
                f"backoff must be from 0 to {MAX_SECONDS:g} seconds, not {self.backoff!r}"
            )
        if self.on_error not in ("raise", "collect"):
            raise ValueError(f"on_error must be 'raise' or 'collect', not {self.on_error!r}")
        if not isinstance(self.results_file, str | PathLike | None):
            raise TypeError(f"results_file is a path, not {self.results_file!r}")

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after an attempt, the first being 0, that failed."""
        return min(self.backoff * 2.0 ** min(attempt, 64), MAX_SECONDS)

    def room(self, num_pulled: int, num_ended: int, num_yielded: int) -> int:
        """Return how many more rows may be pulled.

        At most `max_in_flight` rows run, and at most twice as many are pulled and not yet taken:
        a slow consumer, or one slow row that holds up the order, must not pile up results.
        """
        running, held = num_pulled - num_ended, num_pulled - num_yielded
        return min(self.max_in_flight - running, 2 * self.max_in_flight - held)


def is_retryable(error: BaseException | None) -> bool:
    """Say whether trying again can help: a backend said so of the error or of its cause."""
    chain = () if error is None else causes_of(error)
    found = next((one for one in chain if isinstance(one, BackendError)), None)
    return found is not None and found.retryable


class Runner(Protocol):
    """Runs programs."""

    def run(self, call: Call) -> Result[Any]:
        """Run to the end and return the result; raises what the body or the run raised."""
        ...

    def arun(self, call: Call) -> Awaitable[Result[Any]]:
        """Do the same on the running event loop."""
        ...

    def stream(self, call: Call) -> Stream[Any]:
        """Start a run and return its stream."""
        ...

    def astream(self, call: Call) -> AsyncStream[Any]:
        """Start a run on the running event loop and return its stream."""
        ...

    def batch(self, calls: Iterable[Call], options: BatchOptions) -> Iterator[Result[Any]]:
        """Run calls side by side; they are pulled as there is room."""
        ...

    def abatch(self, calls: Iterable[Call], options: BatchOptions) -> AsyncIterator[Result[Any]]:
        """Do the same on the running event loop."""
        ...

    def plan(self, call: Call) -> Plan:
        """Return what a call will cost up to its first read; no model runs."""
        ...

    def plan_result(self, result: Result[Any]) -> Plan:
        """Return the plan of a run that has ended, with what it did cost."""
        ...


class _Holder:
    """The process-wide default, in one place."""

    default: Runner | None = None


_holder = _Holder()
_current: ContextVar[Runner | None] = ContextVar("umbel_runner", default=None)


def current_runner() -> Runner:
    """Return the runner of this context, or the default; raises ProgramError if there is none."""
    runner = _current.get() or _holder.default
    if runner is None:
        raise ProgramError("no runner: import umbel and choose a backend")
    return runner


def set_default_runner(runner: Runner | None) -> None:
    """Set the runner of every context that has not chosen one."""
    _holder.default = runner


@contextmanager
def use_runner(runner: Runner) -> Iterator[None]:
    """Make `runner` the current one inside a `with` block, in this thread or task only."""
    token = _current.set(runner)
    try:
        yield
    finally:
        _current.reset(token)
