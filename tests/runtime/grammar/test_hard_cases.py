"""Constraints that engines are known to get wrong, through the public way and the default engine.

What they should mean is in `hard_cases.json`, each with the reason it is there.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from umbel.lang.constraints import Constraint
from umbel.lang.errors import ConstraintError
from umbel.runtime.grammar import GrammarCompiler

from .walks import accepts, mask

CASES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("hard_cases.json").read_text(encoding="utf-8")
)


@pytest.fixture(params=CASES, ids=lambda case: case["name"])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.param
    return found


def test_the_possible_is_accepted_and_the_impossible_is_not(
    case: dict[str, Any], smollm2: GrammarCompiler
) -> None:
    constraint: Constraint = msgspec.convert(case["constraint"], Constraint)
    encode = smollm2.vocabulary.encode
    if case["may_refuse"]:
        with contextlib.suppress(ConstraintError):
            smollm2.compile(constraint)
            pytest.fail(f"compiles, so the case needs no leave to be refused: {case['why']}")
        return
    grammar = smollm2.compile(constraint)
    for text in case["possible"]:
        assert accepts(grammar, encode(text)), (case["why"], text)
    for text in case["impossible"]:
        assert not accepts(grammar, encode(text)), (case["why"], text)


def test_the_tokenizers_own_spelling_is_in_the_masks(
    case: dict[str, Any], smollm2: GrammarCompiler
) -> None:
    try:
        grammar = smollm2.compile(msgspec.convert(case["constraint"], Constraint))
    except ConstraintError:
        return
    vocabulary = smollm2.vocabulary
    for text in case["possible"]:
        matcher = grammar.matcher()
        for token_id in vocabulary.encode(text):
            assert token_id in mask(matcher, vocabulary), (text, vocabulary.token_bytes[token_id])
            assert matcher.accept(token_id)
        assert set(vocabulary.eos_ids) <= mask(matcher, vocabulary)


def test_few_cases_may_be_refused() -> None:
    refusable = [case["name"] for case in CASES if case["may_refuse"] and case["possible"]]
    assert len(CASES) == 37
    assert len(refusable) == 5
