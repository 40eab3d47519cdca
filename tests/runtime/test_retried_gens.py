"""Values that a schema forbids afterwards, asked for again on an engine."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.engine_harness import GRAMMAR, TOKENIZER, make_runner

import umbel as ub
from umbel.interpreter.backends.local import LocalBackend
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine


def make_backend() -> LocalBackend:
    config = EngineConfig(max_running=8, max_step_tokens=64)
    return LocalBackend(Engine(make_runner(), TOKENIZER, config, max_seq_len=256, grammar=GRAMMAR))


SCHEMA = {
    "type": "array",
    "items": {"enum": [0, 1, 2]},
    "minItems": 2,
    "maxItems": 2,
    "uniqueItems": True,
}


@ub.function
def pair(s: ub.State, retries: int) -> Any:
    s += "Two: " + ub.gen(
        "pair", schema=SCHEMA, strict=False, retries=retries, temperature=1.0, max_tokens=60
    )
    s += "!"
    return s["pair"]


def test_a_value_that_its_schema_forbids_fails_its_node_alone() -> None:
    with make_backend() as backend:
        rows = [(0,)] * 24
        results = pair.options(backend=backend, seed=3).run_batch(rows, on_error="collect")
    errors = [result.error for result in results if result.error is not None]
    assert 0 < len(errors) < 24
    assert all("non-unique" in str(error) for error in errors)


def test_it_is_drawn_again_until_it_fits_and_the_same_way_each_time() -> None:
    def run() -> list[tuple[Any, str, int]]:
        with make_backend() as backend:
            results = pair.options(backend=backend, seed=3).run_batch([(12,)] * 24)
        return [(r.value, r.text(), r.meta("pair").attempts) for r in results]

    found = run()
    assert all(len(set(value)) == 2 for value, _, _ in found)
    assert all(text.startswith("Two: [") and text.endswith("]!") for _, text, _ in found)
    assert max(attempts for _, _, attempts in found) > 1
    assert found == run()


def test_strict_schemas_refuse_what_cannot_be_followed() -> None:
    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("pair", schema=SCHEMA)

    with (
        make_backend() as backend,
        pytest.raises(ub.GenerationError, match=r"uniqueItems.*strict=False"),
    ):
        program.options(backend=backend).run()
