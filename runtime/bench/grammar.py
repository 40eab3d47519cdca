"""What constraints cost on the host: masks by engine, and mask rows against outlines-core.

Everything that is compared runs in one process, in turns. Knows grammars; models and devices are in
the files beside it.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import llguidance
import numpy as np

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import ConstraintError, EngineError
from umbel.lang.regex_parser import parse
from umbel.lang.regex_syntax import Node, render, to_steps

from ..grammar import GrammarCompiler, TokenBitmask
from ..grammar.compile_worker import Worker
from ..grammar.json_schema import check_schema
from ..grammar.json_to_regex import json_to_regex
from ..grammar.llguidance import LLGuidanceMatcher
from ..grammar.matcher import CompiledGrammar, GrammarMatcher
from ..vocabulary import Vocabulary
from .grammar_cases import EMAIL, JSON_CASES, NESTED, JsonCase

_BUILD_S = 600.0
_ROW_BYTES = 2**30
_SENTINEL = "\U0010fffe\U0010ffff"


@dataclass(frozen=True, slots=True)
class FillFigures:
    """Microseconds per row and step: of filling all rows' masks, and of accepting a token each.

    CPU time of the one thread that works, so that what else the machine does counts little; wall
    time where several work.
    """

    engine: str
    way: str  # "one by one", or in one call
    rows: int
    vocab_size: int
    fill_p50_us: float
    fill_p95_us: float
    accept_p50_us: float


@dataclass(frozen=True, slots=True)
class BuildFigures:
    """Seconds to build the mask rows of one constraint, medians over the repeats."""

    constraint: str
    vocab_size: int
    states: int
    umbel_s: float
    outlines_s: float
    times_faster: float  # the median of the ratios inside a repeat


class _Way(NamedTuple):
    engine: str
    name: str
    fill: Callable[[list[_Row], TokenBitmask], None]
    clock: Callable[[], float]


class _Row:
    """One request of an endless stream of them: its matcher and the tokens it will take."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        grammars: Sequence[tuple[JsonCase, CompiledGrammar]],
        seed: int,
    ) -> None:
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._rng = random.Random(seed)
        self._left: list[int] = []
        self.matcher: GrammarMatcher
        self.renew()
        for _ in range(self._rng.randrange(len(self._left))):  # rows are not in step
            self.accept()

    def renew(self) -> None:
        """Begin another text."""
        case, grammar = self._rng.choice(self._grammars)
        self.matcher = grammar.matcher()
        self._left = self._vocabulary.encode(case.text(self._rng))[::-1]

    def accept(self) -> None:
        """Take the next token of the text."""
        token_id = self._left.pop()
        if not self.matcher.accept(token_id):
            raise EngineError("a text of the benchmark does not satisfy its own schema")

    @property
    def is_over(self) -> bool:
        return not self._left


def run_fills(
    compiler: GrammarCompiler, *, num_rows: int, steps: int, repeats: int, num_threads: int
) -> list[FillFigures]:
    """Fill masks for rows that each follow a random JSON text, engine by engine, in turns.

    Each text is fresh; the grammars are cached, as they are for requests that come again.
    """
    alone = time.thread_time
    ways = [
        _Way("llguidance", "one by one", _fill_each, alone),
        _Way("umbel-dfa", "one by one", _fill_each, alone),
        _Way("default", "one by one", _fill_each, alone),
    ]
    if num_threads > 1:
        executor = llguidance.LLExecutor(num_threads=num_threads)
        name = f"one call, {num_threads} threads"
        ways += [
            _Way("llguidance", "one by one, wall time", _fill_each, time.perf_counter),
            _Way("llguidance", name, partial(_fill_all, executor), time.perf_counter),
        ]
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in ways]
    for repeat in range(repeats):
        for way, found in zip(ways, times, strict=True):
            rows = _rows(compiler, way.engine, num_rows, repeat)
            _measure(compiler.vocabulary.size, rows, way, steps, found)
    return [
        FillFigures(
            way.engine,
            way.name,
            num_rows,
            compiler.vocabulary.size,
            _percentile(fills, 50),
            _percentile(fills, 95),
            _percentile(accepts, 50),
        )
        for way, (fills, accepts) in zip(ways, times, strict=True)
    ]


def run_builds(vocabulary: Vocabulary, *, repeats: int) -> list[BuildFigures]:
    """Build mask rows for all states of two regular constraints, here and in outlines-core.

    Both build in this process, with the vocabulary read beforehand. outlines-core gets the pattern
    that the same automaton is made from, wrapped so that what it builds is right.
    """
    worker = Worker(vocabulary.token_bytes, vocabulary.size, vocabulary.eos_ids[0])
    nested = json_to_regex(check_schema(json.dumps(NESTED)))
    assert nested is not None, "the schema has a regular form"
    _build_here(worker, parse("a"))
    _build_outlines(worker, parse("a"))
    return [
        _build_figures(worker, name, node, repeats)
        for name, node in (("bounded e-mail regex", parse(EMAIL)), ("nested schema", nested))
    ]


def _build_figures(worker: Worker, name: str, node: Node, repeats: int) -> BuildFigures:
    here, there, states = [], [], 0
    for _ in range(repeats):
        seconds, states = _build_here(worker, node)
        here.append(seconds)
        there.append(_build_outlines(worker, node))
    return BuildFigures(
        name,
        worker.vocab_size,
        states,
        statistics.median(here),
        statistics.median(there),
        statistics.median(b / a for a, b in zip(here, there, strict=True)),
    )


def _build_here(worker: Worker, node: Node) -> tuple[float, int]:
    started = time.perf_counter()
    status, *found = worker.dfa(to_steps(node), _BUILD_S, _ROW_BYTES)
    seconds = time.perf_counter() - started
    if status != "ok":
        raise EngineError(f"the automaton could not be built: {found[0]}")
    return seconds, len(found[0])


def _build_outlines(worker: Worker, node: Node) -> float:
    pattern = f"{_SENTINEL}(?:{render(node)})\\z"
    started = time.perf_counter()
    worker.outlines_index(pattern, _SENTINEL)
    return time.perf_counter() - started


def _rows(compiler: GrammarCompiler, engine: str, num_rows: int, seed: int) -> list[_Row]:
    name = None if engine == "default" else engine
    grammars = []
    for case in JSON_CASES:
        try:
            grammar = compiler.compile(JsonSchema(json.dumps(case.schema)), name)
        except ConstraintError:
            if engine != "umbel-dfa":
                raise
            continue  # free JSON nests without end, and long bounded strings have many states
        grammars.append((case, grammar))
    return [_Row(compiler.vocabulary, grammars, seed * num_rows + i) for i in range(num_rows)]


def _measure(
    vocab_size: int,
    rows: list[_Row],
    way: _Way,
    steps: int,
    times: tuple[list[float], list[float]],
) -> None:
    bitmask = TokenBitmask(len(rows), vocab_size)
    for _ in range(steps):
        started = way.clock()
        way.fill(rows, bitmask)
        filled = way.clock()
        for row in rows:
            row.accept()
        ended = way.clock()
        times[0].append((filled - started) / len(rows) * 1e6)
        times[1].append((ended - filled) / len(rows) * 1e6)
        for row in rows:
            if row.is_over:
                row.renew()


def _fill_each(rows: list[_Row], bitmask: TokenBitmask) -> None:
    for index, row in enumerate(rows):
        row.matcher.fill(bitmask.row(index))


def _fill_all(executor: llguidance.LLExecutor, rows: list[_Row], bitmask: TokenBitmask) -> None:
    pairs = []
    for index, row in enumerate(rows):
        assert isinstance(row.matcher, LLGuidanceMatcher)
        pairs.append((row.matcher.inner, index))
    array = bitmask.array
    executor.unsafe_compute_mask_ptr(pairs, array.ctypes.data, array.shape[1] * 4, len(rows))


def _percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))
