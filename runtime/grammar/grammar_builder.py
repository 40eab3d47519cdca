"""One constraint to its compiled grammar, within one lane's time; chooses the engine.

Knows no cache, no waiting requests and no threads.
"""

from __future__ import annotations

import json
import re
import time
from typing import Literal, assert_never

from umbel.lang import gbnf, regex_parser, regex_syntax
from umbel.lang.constraints import Choices, Constraint, Grammar, JsonSchema, Regex
from umbel.lang.errors import ConstraintError
from umbel.lang.regex_syntax import Node
from umbel.lang.unicode_check import check_text

from ..vocabulary import Vocabulary
from . import json_schema
from .byte_dfa import START, ByteDFA, TooManyStatesError
from .compile_process import CompileProcesses
from .gbnf_to_lark import LarkText
from .json_to_regex import json_to_regex
from .lark_front_door import check_lark, with_place
from .leavable_calls import LeavableCalls
from .llguidance import GrammarKind, LLGuidanceTokenizers, compile_llguidance
from .llguidance_words import UnsatisfiableError
from .matcher import CompiledGrammar
from .outlines_core import compile_outlines_core
from .time_limit import TooLateError
from .token_dfa import TokenDFA
from .token_rows import StateRows

# Past this much, or past `Budget.max_states`, llguidance takes over by default: it compiles in a
# millisecond and pays at each step. Sizes decide, never the clock: the same constraint gets the
# same engine, and so the same output, however busy the machine is.
_MAX_ROW_BYTES = 64 * 2**20
_MAX_SUSPECTS = 32  # places of a keyword that are tried one by one, in the time that is left
_MOST_CHARS = 6_000  # of a text that is compiled without a try in another process,
_MOST_COPIES = 100_000  # and of it with all that it may repeat written out
_NUMBER = re.compile("[0-9]+")
_GRACE_S = 5.0  # the worker watches its own clock; it is killed when it doesn't


class GrammarBuilder:
    """Compiles one constraint at a time, each for `seconds` at most in `processes`. Thread-safe."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        tokenizers: LLGuidanceTokenizers,
        processes: CompileProcesses,
        calls: LeavableCalls,
        seconds: float,
    ) -> None:
        self.vocabulary = vocabulary
        self._tokenizers = tokenizers
        self._processes = processes
        self._calls = calls
        self._seconds = seconds

    def build(self, constraint: Constraint, engine: str | None) -> CompiledGrammar:
        """Compile.

        Raises TooLateError past the lane's time, ConstraintError, EngineStoppedError once the
        processes are closed.
        """
        match constraint:
            case Regex(pattern):
                return self._build_node(regex_parser.parse(pattern), engine)
            case Choices(choices):
                for choice in choices:
                    check_text(choice, f"choice {choice!a}")
                options = (regex_syntax.literal(choice) for choice in choices)
                return self._build_node(regex_syntax.alternate(options), engine)
            case JsonSchema(schema, strict):
                checked = json_schema.check_schema(schema, strict=strict)
                return self._build_schema(checked, strict, engine)
            case Grammar(text, syntax):
                return self._build_grammar(text, syntax, engine)
            case _:
                assert_never(constraint)

    def _build_grammar(
        self, text: str, syntax: Literal["lark", "gbnf"], engine: str | None
    ) -> CompiledGrammar:
        if syntax == "lark":
            checked = check_lark(text)
            try:
                return self._build_lark(checked, engine)
            except ConstraintError as error:
                if not error.where:
                    raise
                raise with_place(error) from error
        grammar = gbnf.parse_gbnf(text)
        if (node := grammar.as_regex()) is not None:
            return self._build_node(node, engine)
        lark = LarkText(grammar)
        try:
            return self._build_lark(lark.text, engine)
        except TooLateError:
            raise
        except ConstraintError as error:
            raise lark.translate(error) from error

    def _build_lark(self, text: str, engine: str | None) -> CompiledGrammar:
        if engine not in (None, "llguidance"):
            raise ConstraintError(f"{engine} takes no recursive grammars; llguidance does")
        return self._follow("lark", text)

    def _build_node(self, node: Node, engine: str | None) -> CompiledGrammar:
        if node == regex_syntax.NEVER:
            raise UnsatisfiableError("nothing can satisfy the constraint")
        if engine is None:
            try:
                return self._build_dfa(node)
            except TooManyStatesError:
                engine = "llguidance"
        if engine == "umbel-dfa":
            return self._build_named_dfa(node)
        pattern = self._render(node, engine)
        if engine == "outlines-core":
            return compile_outlines_core(self._processes, self.vocabulary, pattern, self._seconds)
        return self._follow("regex", pattern)

    def _build_schema(
        self, checked: json_schema.CheckedSchema, strict: bool, engine: str | None
    ) -> CompiledGrammar:
        first = checked.unenforced[0] if checked.unenforced else None
        if engine != "llguidance" and (node := json_to_regex(checked)) is not None:
            if node == regex_syntax.NEVER:
                raise UnsatisfiableError("no value can satisfy the schema")
            if engine is not None or first is not None:
                return self._build_node(node, engine or "umbel-dfa")
            try:
                return self._build_dfa(node)
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
        return self._build_open_schema(checked, strict)

    def _build_open_schema(
        self, checked: json_schema.CheckedSchema, strict: bool
    ) -> CompiledGrammar:
        text = "{}" if checked.schema is True else json.dumps(checked.schema)
        deadline = time.monotonic() + self._seconds
        try:
            return self._follow("json_schema", text, lenient=not strict)
        except UnsatisfiableError as error:
            place = self._place_of(error, checked, deadline)
            raise UnsatisfiableError(f"{error}{_at(place)}", where=place) from error
        except TooLateError:
            raise  # what a constraint becomes is never the clock's to say
        except ConstraintError as error:
            if strict:
                place = self._place_of(error, checked, deadline)
                raise ConstraintError(
                    f"{error}{_at(place)}; with strict=False it is checked afterwards", where=place
                ) from error
            # any JSON; the whole schema is checked afterwards
            return self._follow("json_schema", "{}")

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
                self._follow("json_schema", json.dumps(schema), seconds=left_s)
            except TooLateError:
                return ""
            except ConstraintError as other:
                if str(other) == str(error):
                    continue
            return place
        return ""

    def _follow(
        self, kind: GrammarKind, text: str, *, lenient: bool = False, seconds: float | None = None
    ) -> CompiledGrammar:
        """Have llguidance compile; what may take it long, first in a process that can be killed.

        The library's own loops and recursion can't be stopped in this one, and may take all of its
        memory or its stack. What ended there in time ends here too: it is the same work. But that
        may be seconds, for which whoever closes must not wait.
        """
        tokenizers = self._tokenizers  # all that a call that was left holds on to

        def compile_here() -> CompiledGrammar:
            return compile_llguidance(tokenizers, kind, text, lenient=lenient)

        if not _may_take_long(kind, text):
            return compile_here()
        self._try_apart(kind, text, lenient, self._seconds if seconds is None else seconds)
        return self._calls.run(compile_here)

    def _try_apart(self, kind: GrammarKind, text: str, lenient: bool, seconds: float) -> None:
        reply = self._processes.run(
            "probe", kind, text, lenient, seconds, timeout_s=seconds + _GRACE_S
        )
        if reply[0] == "too_long":
            raise TooLateError.of(seconds)
        if reply[0] == "no_memory":
            raise self._processes.memory_error()

    def _build_named_dfa(self, node: Node) -> CompiledGrammar:
        try:
            return self._build_dfa(node)
        except TooManyStatesError as error:
            raise ConstraintError(
                f"the constraint is too large for umbel-dfa ({error}); use llguidance"
            ) from error

    def _build_dfa(self, node: Node) -> CompiledGrammar:
        seconds = self._seconds
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
            raise TooLateError.of(seconds, reply[1])
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


def _at(place: str) -> str:
    return f" (at {place})" if place else ""


def _may_take_long(kind: GrammarKind, text: str) -> bool:
    """Whether the library's limits may not hold: where what is counted, or named, multiplies.

    It spells out what is repeated: 900 times 900 letters took it 3 s. Terminals of a grammar stand
    for each other, each twice in the next; and from about 1,000 rules on its recursion fills a
    thread's stack. Any number of the text may be a count.
    """
    if kind == "lark" or len(text) > _MOST_CHARS:
        return True
    size = len(text)
    for number in _NUMBER.findall(text):
        size *= max(1, int(number)) if len(number) < 10 else _MOST_COPIES
        if size > _MOST_COPIES:
            return True
    return False
