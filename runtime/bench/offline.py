"""Batches of prompts, all submitted at once: what other engines call offline use.

`submit_prompts` is what benchmarks are made of. `OfflineEngine` has the few calls that a harness
for several engines needs: token ids in, a number of tokens out. There prompts become text of as
many tokens, so that what is measured includes encoding.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import ConstraintError, EngineError
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Text
from umbel.lang.results import (
    Event,
    NodeFailed,
    NodeFinished,
    NodeResult,
    NodeStarted,
    RunOptions,
    TextDelta,
)
from umbel.lang.sampling_params import SamplingParams

from ..engine import Engine
from ..grammar import validate_after
from ..program_run import EventSink

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def submit_prompts(engine: Engine, texts: Sequence[str], gens: Sequence[Gen]) -> PromptBatch:
    """Open a run for each prompt and what is generated behind it; return what comes of them."""
    batch = PromptBatch(len(texts))
    for row, (text, gen) in enumerate(zip(texts, gens, strict=True)):
        nodes = (GraphNode(0, "0", Text((text,)), None), GraphNode(1, "1", gen, 0))
        session = engine.open(RunOptions(row=row), batch.sink(row))
        session.extend(RequestGraph(nodes))
        session.close()
    return batch


def free_gen(num_tokens: int, temperature: float) -> Gen:
    """Return what generates exactly so many tokens."""
    return Gen("", SamplingParams(max_tokens=num_tokens, temperature=temperature, ignore_eos=True))


def num_tokens(results: Sequence[NodeResult]) -> int:
    """Return how many tokens were generated."""
    return sum(result.usage.completion_tokens for result in results)


def num_valid(schema: JsonSchema, results: Sequence[NodeResult]) -> int:
    """Return how many texts are values of a schema."""
    valid = 0
    for result in results:
        try:
            validate_after(schema, result.text)
        except ConstraintError:
            continue
        valid += 1
    return valid


class OfflineEngine:
    """An engine on a model folder's shape with random weights; runs batches of prompts.

    Where the folder has no tokenizer a token is a byte, and id i is written as letter i mod 62.
    """

    name = "umbel"

    def __init__(
        self, model_dir: str, max_len: int, tok: str | None = None, **options: Any
    ) -> None:
        folder = Path(model_dir)
        self._has_tokenizer = tok is not None
        for path in Path(tok).glob("tokenizer*") if tok is not None else ():
            (folder / path.name).write_bytes(path.read_bytes())
        started = time.perf_counter()
        self._engine = Engine.from_model(
            f"dummy:{folder / 'config.json'}", max_seq_len=max_len, **options
        )
        self.info = {"start_s": time.perf_counter() - started} | options
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._letters = _LETTERS * (vocab_size // len(_LETTERS) + 1)  # by id

    def run(
        self, prompts: Sequence[Sequence[int]], outs: Sequence[int], temperature: float
    ) -> list[NodeResult]:
        """Generate exactly outs[i] tokens after each prompt; return the results in order."""
        return self._submit(prompts, [free_gen(n, temperature) for n in outs]).results()

    def count(self, results: Sequence[NodeResult]) -> int:
        """Return how many tokens were generated."""
        return num_tokens(results)

    def reset_cache(self) -> None:
        """Forget every cached prefix."""
        self._engine.reset_cache()

    def guided(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, schema: dict[str, Any] | None
    ) -> list[tuple[int, str]]:
        """Generate under a JSON schema, or freely; return tokens and texts."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.8, ignore_eos=schema is None)
        constraint = None if schema is None else JsonSchema(json.dumps(schema))
        gen = Gen("", sampling, constraint)
        results = self._submit(prompts, [gen] * len(prompts)).results()
        return [(result.usage.completion_tokens, result.text) for result in results]

    def timeline(
        self, prompts: Sequence[Sequence[int]], outs: Sequence[int], temperature: float
    ) -> list[list[float]]:
        """Run as `run` does; return when each token of each prompt came, in seconds."""
        batch = self._submit(prompts, [free_gen(n, temperature) for n in outs])
        batch.results()
        return batch.times

    def stats(self) -> dict[str, float]:
        """Return the engine's counters."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop."""
        self._engine.close()

    def _submit(self, prompts: Sequence[Sequence[int]], gens: Sequence[Gen]) -> PromptBatch:
        return submit_prompts(self._engine, [self._text(prompt) for prompt in prompts], gens)

    def _text(self, prompt: Sequence[int]) -> str:
        if self._has_tokenizer:
            return self._engine.tokenizer.decode(prompt)
        return "".join(map(self._letters.__getitem__, prompt))


class PromptBatch:
    """What comes of a batch, as it comes; `times[i]` are those of row i's texts, in seconds."""

    def __init__(self, num_rows: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(num_rows)]
        self._results: list[NodeResult | None] = [None] * num_rows
        self._errors: list[str] = []
        self._missing = num_rows
        self._changed = threading.Condition()
        self._started = time.perf_counter()

    def sink(self, row: int) -> EventSink:
        """Return what takes the events of one row's run."""

        def take(events: Sequence[Event]) -> None:
            now = time.perf_counter() - self._started
            for event in events:
                match event:
                    case TextDelta():
                        self.times[row].append(now)
                    case NodeFinished(1, result):
                        self._end(row, result, "")
                    case NodeFailed(1, error):
                        self._end(row, None, error.message)
                    case NodeStarted() | NodeFinished() | NodeFailed():
                        pass

        return take

    def _end(self, row: int, result: NodeResult | None, error: str) -> None:
        with self._changed:
            self._results[row] = result
            if result is None:
                self._errors.append(error)
            self._missing -= 1
            if self._missing == 0:
                self._changed.notify_all()

    @property
    def has_ended(self) -> bool:
        """Whether nothing is to come any more."""
        return self._missing == 0

    def results(self) -> list[NodeResult]:
        """Wait for all rows and return their results, in order; raises EngineError."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing == 0)
        if self._errors:
            raise EngineError(f"{len(self._errors)} requests failed, the first: {self._errors[0]}")
        return [result for result in self._results if result is not None]
