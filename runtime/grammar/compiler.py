"""Constraint to compiled grammar: chooses the engine, compiles off the engine's thread, caches.

Doesn't know how an engine follows a grammar, nor what a request is.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Literal, NamedTuple, TypeVar, assert_never

from umbel.lang import gbnf, regex_parser, regex_syntax
from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from umbel.lang.errors import ConstraintError, EngineStoppedError, UmbelError
from umbel.lang.regex_syntax import Node
from umbel.lang.unicode_check import check_text

from ..vocabulary import Vocabulary
from . import json_schema
from .byte_dfa import START, ByteDFA, TooManyStatesError
from .compile_process import CompileProcesses
from .gbnf_to_lark import LarkText
from .json_to_regex import json_to_regex
from .lark_front_door import check_lark
from .llguidance import GrammarKind, LLGuidanceTokenizers, compile_llguidance
from .llguidance_words import UnsatisfiableError
from .matcher import CompiledGrammar
from .outlines_core import compile_outlines_core
from .time_limit import took_more_than, within
from .token_dfa import TokenDFA
from .token_rows import StateRows

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENGINES = ("llguidance", "outlines-core", "umbel-dfa")

# Past this much, or past `Budget.max_states`, llguidance takes over by default: it compiles in a
# millisecond and pays at each step. Sizes decide, never the clock: the same constraint gets the
# same engine, and so the same output, however busy the machine is.
_MAX_ROW_BYTES = 64 * 2**20
# llguidance follows rules and references by recursion and takes the process down when its stack is
# full (from about 1,000 rules on); a grammar this long is tried in a child first.
_PROBE_CHARS = 6_000
_MAX_SUSPECTS = 32  # places of a keyword that are tried one by one, in the time that is left
_GRACE_S = 5.0  # the worker watches its own clock; it is killed when it doesn't


class _CacheKey(NamedTuple):
    constraint: Constraint
    engine: str | None


class GrammarCompiler:
    """Compiles constraints for one vocabulary in a small background pool.

    Identical constraints compile once, also while the first is still compiling; results are kept
    up to `cache_bytes`, oldest use first out. Errors aren't kept. Thread-safe.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        cache_bytes: int = 512 * 2**20,
        timeout_s: float = 20.0,
        memory_bytes: int = 2 * 2**30,
        num_threads: int = 4,
        engine: str | None = None,
    ) -> None:
        """`engine` is what constraints take that name none: one of ENGINES, or None for the rule.

        Raises ConstraintError for another name.
        """
        _check_known(engine)
        self._engine = engine
        self.vocabulary = vocabulary
        self._cache_bytes = cache_bytes
        self._timeout_s = timeout_s
        self._llguidance = LLGuidanceTokenizers(vocabulary)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="umbel-grammar")
        self._lock = threading.Lock()
        self._processes = CompileProcesses(vocabulary, memory_bytes)
        self._closed = False
        self._cache: OrderedDict[_CacheKey, Future[CompiledGrammar]] = OrderedDict()

    def submit(self, constraint: Constraint, engine: str | None = None) -> Future[CompiledGrammar]:
        """Start compiling; the future gives the compiled grammar or raises ConstraintError.

        `engine` names one of ENGINES; None takes the compiler's own. Each call has its own future:
        cancelling it doesn't stop others that wait for the same constraint.
        """
        _check_known(engine)
        engine = engine or self._engine
        key = _CacheKey(constraint, engine)
        mine: Future[CompiledGrammar] = Future()
        with self._lock:
            if self._closed:
                raise EngineStoppedError("the grammar compiler is closed")
            shared = self._cache.get(key)
            is_new = shared is None
            if shared is None:
                shared = self._pool.submit(self._compile_safely, constraint, engine)
                self._cache[key] = shared
            self._cache.move_to_end(key)
        # outside the lock: a callback runs at once when the future is done already
        if is_new:
            shared.add_done_callback(lambda done: self._settle(key, done))
        shared.add_done_callback(lambda done: _hand_over(done, mine))
        return mine

    def compile(self, constraint: Constraint, engine: str | None = None) -> CompiledGrammar:
        """Compile and wait. Raises ConstraintError."""
        return self.submit(constraint, engine).result()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do work for a request, such as walking a grammar through the vocabulary, beside others.

        Raises EngineStoppedError once the compiler is closed.
        """
        with self._lock:
            if self._closed:
                raise EngineStoppedError("the grammar compiler is closed")
            return self._pool.submit(work)

    def warm_up(self) -> Future[None]:
        """Start what the first constraint of each kind would wait for.

        llguidance reads the vocabulary with Python's lock held: call this before serving.
        """
        return self._pool.submit(self._warm_up)

    def close(self) -> None:
        """Stop the pool and forget all grammars. What is running ends; what waits is cancelled."""
        with self._lock:
            self._closed = True
        self._processes.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._cache.clear()

    @property
    def cached_bytes(self) -> int:
        """Bytes that the finished grammars in the cache hold, by their own estimate."""
        with self._lock:
            return sum(map(_num_bytes, self._cache.values()))

    def _warm_up(self) -> None:
        started = time.perf_counter()
        self._compile(Regex("a"), self._engine)
        if self._engine is None:
            self._compile(Regex("a"), "llguidance")
        logger.info("constraints can be compiled after %.1f s", time.perf_counter() - started)

    def _settle(self, key: _CacheKey, done: Future[CompiledGrammar]) -> None:
        """Forget a failed compile; keep what one that succeeded gave, and make room for it."""
        with self._lock:
            if self._cache.get(key) is done:
                if done.cancelled() or done.exception() is not None:
                    del self._cache[key]
                else:
                    # by itself: a future keeps its callbacks, and with them all that waited for it
                    kept: Future[CompiledGrammar] = Future()
                    kept.set_result(done.result())
                    self._cache[key] = kept
            total = sum(map(_num_bytes, self._cache.values()))
            for old, future in list(self._cache.items()):
                if total <= self._cache_bytes:
                    break
                if old != key and future.done():
                    total -= _num_bytes(future)
                    del self._cache[old]

    def _compile_safely(self, constraint: Constraint, engine: str | None) -> CompiledGrammar:
        try:
            return self._compile(constraint, engine)
        except UnsatisfiableError as error:  # known in this room only: it has to travel
            raise ConstraintError(str(error), where=error.where) from None
        except UmbelError:
            raise
        except BaseException as error:
            # the thread's edge: a library's panic is this constraint's error, nobody else's
            raise ConstraintError(
                f"compiling the constraint failed: {type(error).__name__}: {error}"
            ) from error

    def _compile(self, constraint: Constraint, engine: str | None) -> CompiledGrammar:
        match constraint:
            case Regex(pattern):
                return self._compile_node(regex_parser.parse(pattern), engine)
            case Choices(choices):
                for choice in choices:
                    check_text(choice, f"choice {choice!a}")
                options = (regex_syntax.literal(choice) for choice in choices)
                return self._compile_node(regex_syntax.alternate(options), engine)
            case JsonSchema(schema, strict):
                checked = json_schema.check_schema(schema, strict=strict)
                return self._compile_schema(checked, strict, engine)
            case Grammar(text, syntax):
                return self._compile_grammar(text, syntax, engine)
            case _:
                assert_never(constraint)

    def _compile_grammar(
        self, text: str, syntax: Literal["lark", "gbnf"], engine: str | None
    ) -> CompiledGrammar:
        if syntax == "lark":
            return self._compile_lark(check_lark(text), engine)
        grammar = gbnf.parse_gbnf(text)
        if (node := grammar.as_regex()) is not None:
            return self._compile_node(node, engine)
        lark = LarkText(grammar)
        try:
            return self._compile_lark(lark.text, engine)
        except ConstraintError as error:
            raise lark.translate(error) from error

    def _compile_lark(self, text: str, engine: str | None) -> CompiledGrammar:
        if engine not in (None, "llguidance"):
            raise ConstraintError(f"{engine} takes no recursive grammars; llguidance does")
        return self._compile_llguidance("lark", text)

    def _compile_node(self, node: Node, engine: str | None) -> CompiledGrammar:
        if node == regex_syntax.NEVER:
            raise UnsatisfiableError("nothing can satisfy the constraint")
        if engine is None:
            try:
                return self._compile_dfa(node)
            except TooManyStatesError:
                engine = "llguidance"
        if engine == "umbel-dfa":
            return self._compile_named_dfa(node)
        pattern = self._render(node, engine)
        if engine == "outlines-core":
            return compile_outlines_core(self._processes, self.vocabulary, pattern, self._timeout_s)
        return self._compile_llguidance("regex", pattern)

    def _compile_schema(
        self, checked: json_schema.CheckedSchema, strict: bool, engine: str | None
    ) -> CompiledGrammar:
        first = checked.unenforced[0] if checked.unenforced else None
        if engine != "llguidance" and (node := json_to_regex(checked)) is not None:
            if node == regex_syntax.NEVER:
                raise UnsatisfiableError("no value can satisfy the schema")
            if engine is not None or first is not None:
                return self._compile_node(node, engine or "umbel-dfa")
            try:
                return self._compile_dfa(node)
            except TooManyStatesError:
                pass  # llguidance counts without states
        elif engine in ("umbel-dfa", "outlines-core"):
            raise ConstraintError(
                f"the schema has no regular form, which {engine} needs; llguidance takes others"
            )
        if first is not None and strict:
            raise ConstraintError(
                f"{first.reason} (at {first.pointer}); with strict=False it is checked afterwards",
                where=first.pointer,
            )
        return self._compile_open_schema(checked, strict)

    def _compile_open_schema(
        self, checked: json_schema.CheckedSchema, strict: bool
    ) -> CompiledGrammar:
        text = "{}" if checked.schema is True else json.dumps(checked.schema)
        deadline = time.monotonic() + self._timeout_s
        try:
            return self._compile_llguidance("json_schema", text, lenient=not strict)
        except UnsatisfiableError as error:
            place = self._place_of(error, checked, deadline)
            raise UnsatisfiableError(f"{error}{_at(place)}", where=place) from error
        except ConstraintError as error:
            if strict:
                place = self._place_of(error, checked, deadline)
                raise ConstraintError(
                    f"{error}{_at(place)}; with strict=False it is checked afterwards", where=place
                ) from error
            # any JSON; the whole schema is checked afterwards
            return self._compile_llguidance("json_schema", "{}")

    def _place_of(
        self, error: ConstraintError, checked: json_schema.CheckedSchema, deadline: float
    ) -> str:
        """Return the pointer of what llguidance refused; "" where that is not found in time.

        Its messages name keywords, never places, and some words are keywords by chance. So the
        places of the one that is named are taken out in turn, until the error is gone.
        """
        schema = checked.schema
        for place in checked.places_of(str(error))[:_MAX_SUSPECTS]:
            schema = json_schema.without_keyword(schema, place)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                self._compile_llguidance("json_schema", json.dumps(schema), seconds=left_s)
            except ConstraintError as other:
                if str(other) == str(error):
                    continue
                if time.monotonic() >= deadline:  # it says nothing of the place
                    break
            return place
        return ""

    def _compile_llguidance(
        self, kind: GrammarKind, text: str, *, lenient: bool = False, seconds: float | None = None
    ) -> CompiledGrammar:
        seconds = self._timeout_s if seconds is None else seconds
        if len(text) > _PROBE_CHARS:
            self._processes.run("probe", kind, text, lenient, timeout_s=seconds)
        self._llguidance.for_kind(kind)  # takes its time once, and no constraint's
        compile_it = partial(compile_llguidance, self._llguidance, kind, text, lenient=lenient)
        return within(seconds, compile_it)

    def _compile_named_dfa(self, node: Node) -> CompiledGrammar:
        try:
            return self._compile_dfa(node)
        except TooManyStatesError as error:
            raise ConstraintError(
                f"the constraint is too large for umbel-dfa ({error}); use llguidance"
            ) from error

    def _compile_dfa(self, node: Node) -> CompiledGrammar:
        seconds = self._timeout_s
        reply = self._processes.run(
            "dfa",
            regex_syntax.to_steps(node),
            seconds,
            _MAX_ROW_BYTES,
            timeout_s=seconds + _GRACE_S,
        )
        if reply[0] == "too_many":
            raise TooManyStatesError(reply[1])
        if reply[0] == "too_long":
            raise took_more_than(f"{seconds:g} s", reply[1])
        _, transitions, accepting, rows, alive, forced_texts = reply
        dfa = ByteDFA(transitions, accepting)
        if dfa.is_empty or not alive[START]:
            raise UnsatisfiableError("nothing that the model can write satisfies the constraint")
        return TokenDFA(self.vocabulary, dfa, StateRows(rows, alive), forced_texts.texts())

    def _render(self, node: Node, engine: str) -> str:
        try:
            return regex_syntax.render(node)
        except ValueError as error:
            raise ConstraintError(f"{engine} can't take the constraint: {error}") from error


def _check_known(engine: str | None) -> None:
    if engine is not None and engine not in ENGINES:
        raise ConstraintError(f"unknown grammar engine {engine!r}: one of {', '.join(ENGINES)}")


def _at(place: str) -> str:
    return f" (at {place})" if place else ""


def _num_bytes(future: Future[CompiledGrammar]) -> int:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 0
    return future.result().num_bytes


def _hand_over(done: Future[CompiledGrammar], mine: Future[CompiledGrammar]) -> None:
    if not mine.set_running_or_notify_cancel():
        return
    if done.cancelled():
        mine.set_exception(EngineStoppedError("the grammar compiler was closed"))
    elif (error := done.exception()) is not None:
        mine.set_exception(error)
    else:
        mine.set_result(done.result())
