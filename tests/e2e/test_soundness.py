"""Whatever a constrained gen gives as complete satisfies its constraint, in any batch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.constraint_set import CONSTRAINTS, Checked
from tests.support.engine_harness import GRAMMAR, TOKENIZER, make_runner

import umbel as ub
from umbel.interpreter.backends.local import LocalBackend
from umbel.lang.constraints import JsonSchema, Regex
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine


@ub.function
def write(s: ub.State, checked: Checked, max_tokens: int) -> None:
    s += ub.user(f"Write an example of this, and nothing else: {checked.name}")
    options: Any = {"temperature": 1.0, "max_tokens": max_tokens}
    match checked.constraint:
        case JsonSchema(schema):
            options["schema"] = schema
        case Regex(pattern):
            options["regex"] = pattern
    s += ub.assistant(ub.gen("value", **options))


def check(backend: LocalBackend, num_each: int, max_tokens: int) -> Counter[str]:
    """Generate for every constraint, all at once; return how the generations ended."""
    rows = [(checked, max_tokens) for checked in CONSTRAINTS for _ in range(num_each)]
    results = write.options(backend=backend, seed=11).run_batch(rows, progress=False)
    ends: Counter[str] = Counter()
    for (checked, _), result in zip(rows, results, strict=True):
        sample = result.meta("value").samples[0]
        complete = checked.allows(sample.text)
        ends[f"{sample.finish_reason}, {'complete' if complete else 'cut'}"] += 1
        assert sample.accepting == complete, (checked.name, sample.text)
        if not complete:  # it was cut, and says so
            assert sample.finish_reason == "length"
            with pytest.raises(ub.TruncatedError):
                result["value"]
    return ends


@pytest.mark.parametrize("max_tokens", [400, 6])
def test_hash_logits_write_nothing_that_a_constraint_forbids(max_tokens: int) -> None:
    config = EngineConfig(max_running=16, max_step_tokens=256)
    runner = make_runner(num_slots=16_384)
    engine = Engine(runner, TOKENIZER, config, max_seq_len=1024, grammar=GRAMMAR)
    with LocalBackend(engine) as backend:
        ends = check(backend, 1, max_tokens)
    assert ends["stop, cut"] == 0
    assert ends["stop, complete"] > 10
    if max_tokens == 6:
        assert ends["length, cut"] > 10


@pytest.mark.slow
def test_three_hundred_generations_of_a_real_model_satisfy_their_constraints(
    smollm2_path: Path,
) -> None:
    with LocalBackend.from_model(str(smollm2_path), max_running=64, max_seq_len=1024) as backend:
        ends = check(backend, 5, 400)
    print(f"{len(CONSTRAINTS)} constraints: {dict(ends)}")  # noqa: T201
    assert len(CONSTRAINTS) == 60
    assert ends.total() == 300
    assert ends["stop, complete"] == 300  # every constraint has an end within 400 tokens
