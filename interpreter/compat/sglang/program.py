"""SGLang's `@function` and what it returns: binds arguments and runs the body as umbel's runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import update_wrapper
from typing import Any, Literal, overload

from umbel.lang.errors import GenerationError, ProgramError
from umbel.lang.graph import RequestGraph
from umbel.lang.primitives import sampling_params
from umbel.lang.run_result import Result
from umbel.lang.runner import BatchOptions, Call, Settings, current_runner
from umbel.lang.state import State
from umbel.lang.trace import trace

from ...backends.base import Backend
from ...interpreter import Execution, Interpreter
from ...stream import start_stream
from .primitives import is_sampling_option, sampling_options
from .state import ProgramState, Record

#: rows of a batch that run at once, if the caller does not say
_MAX_IN_FLIGHT = 512


class _Body:
    """A program's body, for one run: it gets the state under SGLang's names."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.record = Record()
        self.is_ended = False

    def __call__(self, state: State, *args: Any, **kwargs: Any) -> None:
        self.record.value = self._function(ProgramState(state, self.record), *args, **kwargs)
        self.is_ended = True


class SglFunction:
    """A function over a state, which can be run; never changed by that.

    `run`, `trace` and calling it take the function's own arguments besides SGLang's options; a
    name that both know belongs to the function.
    """

    __name__: str

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if inspect.iscoroutinefunction(func):
            raise ProgramError(f"{func.__qualname__} is async: make it an @umbel.function")
        parameters = list(inspect.signature(func).parameters.values())
        if not parameters:
            raise ProgramError(f"{func!r} has no parameters: the first one is the state")
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens  # changes nothing: see the migration page
        self.bind_arguments = dict(bind_arguments or {})
        self.arg_names = [p.name for p in parameters[1:] if p.kind not in _VARIADIC]
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        update_wrapper(self, func)

    def bind(self, **kwargs: Any) -> SglFunction:
        """Return the program with some arguments set; arguments of a call win over them."""
        unknown = [name for name in kwargs if name not in self.arg_names]
        if unknown and not self._takes_any:
            raise TypeError(f"{self.__name__} has no parameter {unknown[0]!r}")
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bind_arguments, **kwargs})

    def run(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the body in this thread, and return its state while the rest still runs.

        Options are those of SGLang: `max_new_tokens` (128), `temperature` (1.0), `stop`, `top_p`
        and so on, the defaults of the program's gens; `backend`; and `stream`, with which the body
        has a pool thread. What the body raises is raised here, or told by a streamed state.
        """
        arguments, options = self._split(kwargs)
        is_stream = options.pop("stream", False)
        body = _Body(self.func)
        call = self._call(body, args, arguments, _settings(options))
        interpreter = _interpreter()
        if is_stream:
            stream = start_stream(interpreter, call)
            return ProgramState(stream.state, body.record, stream=stream)
        execution = Execution(interpreter, call)
        execution.run_body()
        if execution.error is not None:
            raise execution.error
        return ProgramState(execution.state, body.record)

    @overload
    def run_batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Backend | None = None,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        **options: Any,
    ) -> list[ProgramState]: ...
    @overload
    def run_batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        generator_style: Literal[True],
        backend: Backend | None = None,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        **options: Any,
    ) -> Iterator[ProgramState]: ...
    def run_batch(
        self,
        batch_kwargs: Iterable[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Backend | None = None,
        num_threads: str | int = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **options: Any,
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Run the program once per row, side by side; return the states in the order of the rows.

        A row is a mapping of arguments, or a list or tuple of them. `num_threads` is how many rows
        run at once; no threads are made for them. With `generator_style` the states are yielded as
        they come. Where a gen failed, the state's `error()` says why; other exceptions of a body
        are raised.
        """
        settings = _settings({"backend": backend, **self._only_sampling(options)})
        bodies: list[_Body] = []
        calls: list[Call] = []
        for row in batch_kwargs:
            body = _Body(self.func)
            args, kwargs = _arguments(row)
            bodies.append(body)
            calls.append(self._call(body, args, kwargs, settings))
        max_in_flight = _MAX_IN_FLIGHT if num_threads == "auto" else int(num_threads)
        how = BatchOptions(max_in_flight, progress_bar, "collect", True, len(calls))
        states = _states(current_runner().batch(calls, how), bodies)
        return states if generator_style else list(states)

    def trace(self, *, backend: Backend | None = None, **kwargs: Any) -> RequestGraph:
        """Return the graph of the program up to its first read, with these arguments.

        It is the real body with real arguments, so all that have no default are needed; `backend`
        changes nothing.
        """
        return trace(self._call(_Body(self.func), (), kwargs, _settings({})))

    def cache(self, backend: Backend | None = None) -> None:
        """Do nothing: a run finds what earlier runs, and rows beside it, computed of its prefix."""

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program, also inside another one; see `run`."""
        return self.run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<SGLang program {self.__name__}>"

    def _call(
        self,
        body: _Body,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        settings: Settings,
    ) -> Call:
        taken = self.arg_names[: len(args)]
        bound = {name: value for name, value in self.bind_arguments.items() if name not in taken}
        return Call(body, False, (), args, {**bound, **kwargs}, settings)

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the function's own arguments, and the options of the run."""
        options = {
            name: value
            for name, value in kwargs.items()
            if name not in self.arg_names and (name in _HOW or is_sampling_option(name))
        }
        return {name: kwargs[name] for name in kwargs if name not in options}, options

    def _only_sampling(self, options: dict[str, Any]) -> dict[str, Any]:
        unknown = [name for name in options if not is_sampling_option(name)]
        if unknown:
            raise TypeError(f"run_batch() has no option {unknown[0]!r}")
        return options


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> SglFunction: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> SglFunction | Callable[[Callable[..., Any]], SglFunction]:
    """Make a program of a function whose first parameter is the state.

    `num_api_spec_tokens` changes nothing: gens of one turn need no guesses to share a request.
    """
    if func is not None:
        return SglFunction(func, num_api_spec_tokens)
    return lambda found: SglFunction(found, num_api_spec_tokens)


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_HOW = frozenset({"backend", "stream", "use_thread"})


def _settings(options: Mapping[str, Any]) -> Settings:
    sampling = {name: value for name, value in options.items() if name not in _HOW}
    # SGLang samples at temperature 1 where nothing is said; umbel would decode greedily
    params = sampling_params(sampling_options({"temperature": 1.0, **sampling}))
    return Settings(backend=options.get("backend"), sampling=params)


def _interpreter() -> Interpreter:
    runner = current_runner()
    if not isinstance(runner, Interpreter):
        raise ProgramError(f"SGLang programs run on umbel's interpreter, not on {runner!r}")
    return runner


def _arguments(row: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(row, Mapping):
        return (), dict(row)
    if isinstance(row, list | tuple):
        return tuple(row), {}
    raise TypeError(f"a row is a mapping, list or tuple of arguments, not {row!r}")


def _states(results: Iterator[Result[Any]], bodies: Sequence[_Body]) -> Iterator[ProgramState]:
    for result, body in zip(results, bodies, strict=True):
        error = result.error
        is_kept = error is None or body.is_ended or isinstance(error, GenerationError)
        if result.state is None or not is_kept:
            assert error is not None, "a result has a state or an error"
            raise error
        yield ProgramState(result.state, body.record, error=error)
