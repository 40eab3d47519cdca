"""Batches of prompts through an engine with a thread of its own, as other engines run them.

`OfflineEngine` has the few calls that a harness for several engines needs: token ids in, a number
of tokens out. Prompts become text of as many tokens, so that what is measured includes encoding.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import EngineError
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

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


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

    def run(
        self, prompts: Sequence[Sequence[int]], outs: Sequence[int], temperature: float
    ) -> list[NodeResult]:
        """Generate exactly outs[i] tokens after each prompt; return the results in order."""
        return self._generate(
            prompts,
            [
                Gen("", SamplingParams(max_tokens=n, temperature=temperature, ignore_eos=True))
                for n in outs
            ],
        ).results()

    def count(self, results: Sequence[NodeResult]) -> int:
        """Return how many tokens were generated."""
        return sum(result.usage.completion_tokens for result in results)

    def reset_cache(self) -> None:
        """Forget every cached prefix."""
        self._engine.reset_cache()

    def guided(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, schema: dict[str, Any] | None
    ) -> list[tuple[int, str]]:
        """Generate under a JSON schema, or freely; return tokens and texts."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.8, ignore_eos=schema is None)
        constraint = None if schema is None else JsonSchema(json.dumps(schema))
        gen = Gen("", sampling, constraint)
        results = self._generate(prompts, [gen] * len(prompts)).results()
        return [(result.usage.completion_tokens, result.text) for result in results]

    def timeline(
        self, prompts: Sequence[Sequence[int]], outs: Sequence[int], temperature: float
    ) -> list[list[float]]:
        """Run as `run` does; return when each token of each prompt came, in seconds."""
        gens = [
            Gen("", SamplingParams(max_tokens=n, temperature=temperature, ignore_eos=True))
            for n in outs
        ]
        batch = self._generate(prompts, gens)
        batch.results()
        return batch.times

    def stats(self) -> dict[str, float]:
        """Return the engine's counters."""
        return self._engine.stats()

    def close(self) -> None:
        """Stop."""
        self._engine.close()

    def _generate(self, prompts: Sequence[Sequence[int]], gens: Sequence[Gen]) -> _Batch:
        batch = _Batch(len(prompts))
        for row, (prompt, gen) in enumerate(zip(prompts, gens, strict=True)):
            nodes = (
                GraphNode(0, "0", Text((self._text(prompt),)), None),
                GraphNode(1, "1", gen, 0),
            )
            session = self._engine.open(RunOptions(row=row), batch.sink(row))
            session.extend(RequestGraph(nodes))
            session.close()
        return batch

    def _text(self, prompt: Sequence[int]) -> str:
        if self._has_tokenizer:
            return self._engine.tokenizer.decode(prompt)
        return "".join(_LETTERS[token_id % len(_LETTERS)] for token_id in prompt)


class _Batch:
    """The results of a batch as they come."""

    def __init__(self, num_rows: int) -> None:
        self.times: list[list[float]] = [[] for _ in range(num_rows)]
        self._results: list[NodeResult | None] = [None] * num_rows
        self._errors: list[str] = []
        self._missing = num_rows
        self._changed = threading.Condition()
        self._started = time.perf_counter()

    def sink(self, row: int) -> Any:
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

    def results(self) -> list[NodeResult]:
        with self._changed:
            self._changed.wait_for(lambda: self._missing == 0)
        if self._errors:
            raise EngineError(f"{len(self._errors)} requests failed, the first: {self._errors[0]}")
        return [result for result in self._results if result is not None]
