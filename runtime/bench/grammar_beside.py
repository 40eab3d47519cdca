"""What a long compile does to requests that decode beside it.

Knows engines and their steps; what is compiled is large, and nobody waits for it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from umbel.lang.constraints import Regex
from umbel.lang.errors import ConstraintError, EngineError

from ..grammar import GrammarCompiler
from ..vocabulary import Vocabulary
from .engines import BenchmarkModel
from .grammar_cases import EMAIL
from .live_steps import LiveSteps
from .offline import free_gen, submit_prompts

_DECODING = 32
_MAX_TOKENS = 500  # of a request; then others take its place
_LEAST_STEPS = 10
_REPEATS = 1  # of the first pattern that is compiled; the next are twice as long each
_PATIENCE = 3  # times as long as it is to take at least, a compile may take
_MEMORY_BYTES = 16 << 30


@dataclass(frozen=True, slots=True)
class BesideFigures:
    """Milliseconds between the tokens of requests that decode, alone and beside compiles.

    Of steps in which all of them decode. `p99_added` is a share of the p99 alone. Steps in which a
    compile hands over what it made are among those beside it, so that `beside_max_ms` says whether
    one waits for that; where no compile made anything (`largest_mib` is 0), it does not.
    """

    model: str
    requests: int
    vocab_size: int  # of what is compiled
    compiles: int  # that ended meanwhile, one after the other
    longest_compile_s: float
    largest_mib: float  # of what one of them made; the others were given up
    alone_p50_ms: float
    beside_p50_ms: float
    alone_p99_ms: float
    beside_p99_ms: float
    p99_added: float
    alone_max_ms: float
    beside_max_ms: float


class _LongCompiles:
    """Compiles larger and larger patterns on a thread, until it is closed or one is refused.

    outlines-core takes longest of the engines; a compile that takes too long is given up, which
    counts as its end.
    """

    def __init__(self, vocabulary: Vocabulary, timeout_s: float) -> None:
        self.seconds: list[float] = []  # of each that has ended
        self.largest_bytes = 0  # of what they made
        self._compiler = GrammarCompiler(
            vocabulary, timeout_s=timeout_s, memory_bytes=_MEMORY_BYTES
        )
        self._compiler.compile(Regex("a"), "outlines-core")  # its process is there from now on
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._compile_all, name="umbel-long-compiles")
        self._thread.start()

    def close(self) -> None:
        """End what is being compiled."""
        self._stop.set()
        self._compiler.close()
        self._thread.join()

    def lasted(self, seconds: float) -> bool:
        """Whether a compile has ended that took so long. Raises EngineError where none will."""
        may_come = self._thread.is_alive()
        if any(took >= seconds for took in self.seconds):
            return True
        if not may_come:
            raise EngineError(f"no constraint takes {seconds:g} s to compile: lower --seconds")
        return False

    def _compile_all(self) -> None:
        repeats, is_refused = _REPEATS, False
        while not is_refused:
            started = time.perf_counter()
            try:
                pattern = Regex(f"({EMAIL}; ){{{repeats}}}")
                made = self._compiler.compile(pattern, "outlines-core")
                self.largest_bytes = max(self.largest_bytes, made.num_bytes)
            except (ConstraintError, EngineError):  # out of time or memory, too large, or closed
                is_refused = True
            if self._stop.is_set():
                return
            self.seconds.append(time.perf_counter() - started)
            repeats *= 2


def run_beside(model: BenchmarkModel, vocabulary: Vocabulary, *, seconds: float) -> BesideFigures:
    """Time the steps of requests that decode for `seconds`, then beside a compile of that length.

    Raises EngineError where too few steps had all requests in them, or no compile is that long.
    """
    alone = _step_ms(model, seconds, None)
    compiles = _LongCompiles(vocabulary, _PATIENCE * seconds)
    try:
        beside = _step_ms(model, seconds, compiles)
        ended, largest_bytes = list(compiles.seconds), compiles.largest_bytes
    finally:
        compiles.close()
    (p50, p99, most), (beside_p50, beside_p99, beside_most) = (
        [float(np.percentile(ms, q)) for q in (50, 99, 100)] for ms in (alone, beside)
    )
    return BesideFigures(
        model=model.name,
        requests=_DECODING,
        vocab_size=vocabulary.size,
        compiles=len(ended),
        longest_compile_s=max(ended),
        largest_mib=largest_bytes / 2**20,
        alone_p50_ms=p50,
        beside_p50_ms=beside_p50,
        alone_p99_ms=p99,
        beside_p99_ms=beside_p99,
        p99_added=beside_p99 / p99 - 1,
        alone_max_ms=most,
        beside_max_ms=beside_most,
    )


def _step_ms(model: BenchmarkModel, seconds: float, compiles: _LongCompiles | None) -> list[float]:
    """Return the milliseconds of each step in which all requests decode."""
    engine = model.new_engine()
    steps = LiveSteps(engine, _DECODING)
    texts = [f"Request {row}: " for row in range(_DECODING)]
    gen = free_gen(min(_MAX_TOKENS, model.max_seq_len - 64), 0.0)
    try:
        batch = submit_prompts(engine, texts, [gen] * _DECODING)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or not (compiles is None or compiles.lasted(seconds)):
            if batch.has_ended:
                batch = submit_prompts(engine, texts, [gen] * _DECODING)
            steps.step()
    finally:
        engine.close()
    if len(steps.seconds) < _LEAST_STEPS:
        raise EngineError(
            f"{_DECODING} requests of {_MAX_TOKENS} tokens ran side by side for "
            f"{len(steps.seconds)} steps only: raise --kv-tokens, or --seconds"
        )
    return [1e3 * step for step in steps.seconds]
