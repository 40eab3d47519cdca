"""`@function` and the program it makes: binds arguments and asks the current runner to run it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import update_wrapper, wraps
from os import PathLike
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from .errors import ProgramError
from .graph import RequestGraph
from .number_checks import check_seed
from .plan import Plan
from .primitives import check_timeout, sampling_params
from .run_result import Result
from .runner import (
    OPTION_NAMES,
    BatchOptions,
    Call,
    OnError,
    Runner,
    Settings,
    check_backend,
    current_runner,
    option_hint,
)
from .sampling_params import SamplingParams
from .state import State
from .streaming import AsyncStream, Stream
from .suggestions import check_keywords, guess, nearest
from .trace import trace

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
F = TypeVar("F", bound=Callable[..., Any])


def _sampling_hint(name: str, value: object) -> str:
    if name in SamplingParams.__struct_fields__:
        return f"defaults of gens go into sampling={{{name!r}: {value!r}}}"
    meant = guess(name, [*OPTION_NAMES, *SamplingParams.__struct_fields__])
    if not meant or meant in OPTION_NAMES:
        return ""
    return f"did you mean sampling={{{meant!r}: {value!r}}}?"


def _takes_state(call: F) -> F:
    """Make a program's call refuse, with how to run it, what does not begin with a state."""

    @wraps(call)
    def checked(program: Program[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not args or not isinstance(args[0], State):
            name = program.__name__
            raise TypeError(
                f"{name}(...) inside a program takes the state first, "
                f"not {type(args[0]).__name__ if args else 'nothing'}; "
                f"to run it, call {name}.run(...)"
            )
        return call(program, *args, **kwargs)

    return cast(F, checked)


class Program(Generic[P, R]):
    """A function over a state, which can be run. Never changed: `bind` and `options` make new ones.

    All keywords of `run`, `stream`, `bind`, `compile` and `plan` belong to the function's own
    parameters, whatever their names; how a program runs is set with `options`.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        *,
        prefix: tuple[Any, ...] = (),
        bound: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._body = body
        self._prefix = prefix  # the instance, for a method
        self._bound = dict(bound or {})
        self._settings = settings or Settings()
        self._is_async = inspect.iscoroutinefunction(body)
        update_wrapper(self, body)

    def run(self, /, *args: P.args, **kwargs: P.kwargs) -> Result[R]:
        """Run to the end and return the result.

        Raises what the body raises, and the GenerationError of a failed node that the text depends
        on.
        """
        return self._runner().run(self._call(args, kwargs))

    async def arun(self, /, *args: P.args, **kwargs: P.kwargs) -> Result[R]:
        """Run on the running event loop; a `def` body runs in a pool thread."""
        return await self._runner().arun(self._call(args, kwargs))

    def stream(self, /, *args: P.args, **kwargs: P.kwargs) -> Stream[R]:
        """Start a run and return its stream: iterate it for text, or its `events()`."""
        return self._runner().stream(self._call(args, kwargs))

    def astream(self, /, *args: P.args, **kwargs: P.kwargs) -> AsyncStream[R]:
        """Start a run on the running event loop and return its stream."""
        return self._runner().astream(self._call(args, kwargs))

    def compile(self, /, *args: P.args, **kwargs: P.kwargs) -> RequestGraph:
        """Return the graph of the program up to its first read, with these arguments.

        The body runs once, as far as that. Raises what it raises.
        """
        return trace(self._call(args, kwargs))

    def plan(self, /, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Return what the program will cost up to its first read, with these arguments.

        The body runs once, as far as that, and no model. The tokens of text are counted where the
        program's backend has a tokenizer in this process, and estimated elsewhere. Raises what the
        body raises.
        """
        return self._runner().plan(self._call(args, kwargs))

    @check_keywords()
    def run_batch(
        self,
        rows: Iterable[Any],
        *,
        max_in_flight: int = 512,
        progress: bool | None = None,
        on_error: OnError = "raise",
        ordered: bool = True,
        retries: int = 0,
        backoff: float = 0.5,
        results_file: str | PathLike[str] | None = None,
    ) -> list[Result[R]]:
        """Run the program once per row, side by side, and return the results.

        A row is a mapping of keywords, a tuple of positional arguments, or the one argument
        itself. Rows are pulled as there is room for them: at most `max_in_flight` run at once,
        and as many again wait to be taken. Results come in the order of the rows, or with
        `ordered=False` as they end (`result.row` says which row it was). With
        ``on_error="raise"`` the first failure is raised, with a note that says the row, and the
        rest cancelled; with ``"collect"`` each result holds its `error`. A progress bar (tqdm) is
        shown on a terminal; `progress` forces it on or off.

        A row that fails with a retryable error (the backend says which are: a lost connection, a
        busy server) is run again from the start, its body included, up to `retries` times, after
        `backoff` seconds, doubled each time.

        With a `results_file` each row that ends is written there at once, as a line of JSON, and
        rows that the file has finished are not run but read back: a batch that broke off is run
        again with the same rows to go on. Rows that failed are run again. Raises ProgramError
        when the program or a finished row has changed since, when another batch uses the file, and
        for values that have no form in it.
        """
        return list(
            self.iter_batch(
                rows,
                max_in_flight=max_in_flight,
                progress=progress,
                on_error=on_error,
                ordered=ordered,
                retries=retries,
                backoff=backoff,
                results_file=results_file,
            )
        )

    @check_keywords()
    def iter_batch(
        self,
        rows: Iterable[Any],
        *,
        max_in_flight: int = 512,
        progress: bool | None = None,
        on_error: OnError = "raise",
        ordered: bool = True,
        retries: int = 0,
        backoff: float = 0.5,
        results_file: str | PathLike[str] | None = None,
    ) -> Iterator[Result[R]]:
        """Do what `run_batch` does, and yield the results while the rest still runs."""
        options = BatchOptions(
            max_in_flight, progress, on_error, ordered, _size(rows), retries, backoff, results_file
        )
        return self._runner().batch(self._calls(rows), options)

    @check_keywords()
    async def arun_batch(
        self,
        rows: Iterable[Any],
        *,
        max_in_flight: int = 512,
        progress: bool | None = None,
        on_error: OnError = "raise",
        ordered: bool = True,
        retries: int = 0,
        backoff: float = 0.5,
        results_file: str | PathLike[str] | None = None,
    ) -> list[Result[R]]:
        """Do what `run_batch` does, on the running event loop."""
        options = BatchOptions(
            max_in_flight, progress, on_error, ordered, _size(rows), retries, backoff, results_file
        )
        results = self._runner().abatch(self._calls(rows), options)
        return [result async for result in results]

    @check_keywords()
    def aiter_batch(
        self,
        rows: Iterable[Any],
        *,
        max_in_flight: int = 512,
        progress: bool | None = None,
        on_error: OnError = "raise",
        ordered: bool = True,
        retries: int = 0,
        backoff: float = 0.5,
        results_file: str | PathLike[str] | None = None,
    ) -> AsyncIterator[Result[R]]:
        """Do what `iter_batch` does, on the running event loop."""
        options = BatchOptions(
            max_in_flight, progress, on_error, ordered, _size(rows), retries, backoff, results_file
        )
        return self._runner().abatch(self._calls(rows), options)

    def bind(self, /, **kwargs: Any) -> Program[..., R]:
        """Return the program with some arguments set; arguments of a call win over them.

        Raises TypeError for a name that the program has no parameter of.
        """
        parameters = [*inspect.signature(self._body).parameters.values()][len(self._prefix) + 1 :]
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            for name in kwargs:
                if name not in known:
                    raise TypeError(
                        f"{self.__name__} has no parameter {name!r}: "
                        + (option_hint(name) or nearest(name, known))
                    )
        return self._with(bound={**self._bound, **kwargs})

    @check_keywords(_sampling_hint)
    def options(
        self,
        *,
        backend: object | None = None,
        seed: int | None = None,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Self:
        """Return the program with other settings; what is not given stays as it was.

        `sampling` holds defaults for its gens. Without a `seed` each run draws its own (the result
        tells it). `timeout` is in seconds, for a whole run.
        """
        check_timeout(timeout)
        if seed is not None:
            check_seed(seed)
        if backend is not None:
            check_backend(backend)
        old = self._settings
        settings = Settings(
            backend=old.backend if backend is None else backend,
            seed=old.seed if seed is None else seed,
            sampling=old.sampling if sampling is None else sampling_params(sampling),
            timeout=old.timeout if timeout is None else timeout,
        )
        return self._with(settings=settings)

    @_takes_state
    def __call__(self, state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Write the program into another program's state, and return what its body returns."""
        call = self._call(args, kwargs)
        before = state._defaults
        state._defaults = call.settings.sampling or before
        try:
            inlined: R = call.start(state)
        finally:
            state._defaults = before
        return inlined

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        """Bind a program that is a method to its instance."""
        return self if instance is None else self._with(prefix=(instance,))

    def __repr__(self) -> str:
        return f"<program {self.__name__}>"

    __name__: str

    def _with(
        self,
        *,
        prefix: tuple[Any, ...] | None = None,
        bound: Mapping[str, Any] | None = None,
        settings: Settings | None = None,
    ) -> Self:
        return type(self)(
            self._body,
            prefix=self._prefix if prefix is None else prefix,
            bound=self._bound if bound is None else bound,
            settings=settings or self._settings,
        )

    def _runner(self) -> Runner:
        return current_runner()

    def _call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], row: int | None = None
    ) -> Call:
        bound = self._bound
        if bound and args:
            taken = self._positional()[: len(args)]
            bound = {name: value for name, value in bound.items() if name not in taken}
        merged = {**bound, **kwargs}
        return Call(self._body, self._is_async, self._prefix, args, merged, self._settings, row)

    def _calls(self, rows: Iterable[Any]) -> Iterator[Call]:
        if isinstance(rows, str | bytes | bytearray | Mapping):
            raise TypeError(
                f"rows are several: a list of {{'parameter': value}} or of single arguments, "
                f"not one {type(rows).__name__}"
            )
        try:
            each = iter(rows)  # what has only __getitem__, as many data sets do, will do
        except TypeError as error:
            raise TypeError(f"rows are a list or another iterable, not {rows!r}") from error
        return (self._row(number, row) for number, row in enumerate(each))

    def _row(self, number: int, row: Any) -> Call:
        if isinstance(row, Mapping):
            return self._call((), row, number)
        return self._call(row if isinstance(row, tuple) else (row,), {}, number)

    def _positional(self) -> list[str]:
        """Return the names of the parameters after the state that can be given by position."""
        parameters = list(inspect.signature(self._body).parameters.values())
        positional = [
            p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        return positional[len(self._prefix) + 1 :]


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class AsyncProgram(Program[P, R]):
    """A program with an `async def` body."""

    @_takes_state
    def __call__(  # type: ignore[override]
        self, state: State, /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]:
        """Write the program into another program's state; awaited, it is what its body returns.

        Raises ProgramError in a `def` body, which could not await it.
        """
        if not _is_on_loop():
            raise ProgramError(
                f"{self.__name__} is an async program, which a `def` body can't await: make the "
                f"body `async def` and write `await {self.__name__}(s, ...)`"
            )
        return self._inlined(state, *args, **kwargs)

    async def _inlined(self, state: State, /, *args: P.args, **kwargs: P.kwargs) -> R:
        inlined: Any = super().__call__(state, *args, **kwargs)
        found: R = await inlined
        return found


@overload
def function(
    body: Callable[Concatenate[State, P], Coroutine[Any, Any, R]],
) -> AsyncProgram[P, R]: ...
@overload
def function(
    body: Callable[Concatenate[S, State, P], Coroutine[Any, Any, R]],
) -> AsyncProgram[P, R]: ...
@overload
def function(body: Callable[Concatenate[State, P], R]) -> Program[P, R]: ...
@overload
def function(body: Callable[Concatenate[S, State, P], R]) -> Program[P, R]: ...
def function(body: Callable[..., Any]) -> Program[..., Any]:
    """Make a program of a function, `def` or `async def`, whose first parameter is the state.

    In a class the first parameter is `self` and the second the state.

    >>> @function
    ... def greet(s, name):
    ...     s += "Hello " + name
    >>> greet
    <program greet>

    Raises TypeError for what is no function, ProgramError for a generator function or one without
    parameters.
    """
    if not callable(body):
        raise TypeError(f"function takes a function, not {body!r}")
    if inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body):
        raise ProgramError(f"{body.__qualname__} yields: a program appends to its state instead")
    if not inspect.signature(body).parameters:
        raise ProgramError(f"{body!r} has no parameters: the first one is the state")
    return AsyncProgram(body) if inspect.iscoroutinefunction(body) else Program(body)


def _size(rows: Iterable[Any]) -> int | None:
    try:
        return len(rows)  # type: ignore[arg-type]  # generators have no length
    except TypeError:
        return None
