"""What token healing is for, on the real small model: prompts that end inside a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import umbel as ub
from umbel.interpreter.backends.local import LocalBackend

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def backend(smollm2_path: Path) -> Iterator[LocalBackend]:
    with LocalBackend.from_model(str(smollm2_path)) as backend:
        yield backend


@ub.function
def go_on(s: ub.State, prompt: str, heal: bool) -> str:
    s += prompt + ub.gen("x", heal=heal, max_tokens=6, stop="\n")
    return str(s["x"])


@ub.function
def finish(s: ub.State) -> str:
    s += "The capital of France is " + ub.gen("city", heal=True, regex="[A-Z][a-z]{1,20}[.,]")
    return str(s["city"])


@pytest.mark.parametrize(
    ("prompt", "value"),
    [("The capital of France is ", "Paris"), ("He lives in the United Sta", "tes")],
)
def test_rule_10_a_prompt_that_ends_inside_a_token_is_gone_on_from_as_if_it_did_not(
    backend: LocalBackend, prompt: str, value: str
) -> None:
    program = go_on.options(backend=backend)
    healed = program.run(prompt, heal=True)
    assert healed.value.startswith(value)
    assert healed.text() == prompt + healed.value
    assert healed.meta("x").samples[0].num_replaced == 1
    assert not program.run(prompt, heal=False).value.startswith(value)


def test_rule_10_the_token_over_the_border_satisfies_the_constraint(backend: LocalBackend) -> None:
    result = finish.options(backend=backend).run()
    assert result.value in ("Paris.", "Paris,")
    assert result.meta("city").usage.completion_tokens == 2  # " Paris" is one token
