"""The closed part of JSON text, for every place where the text can end."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.interpreter.partial_json import closed_part

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def is_part(part: Any, whole: Any) -> bool:
    """Whether `part` is `whole` with some last members left out."""
    if isinstance(part, dict) and isinstance(whole, dict):
        names = list(whole)[: len(part)]
        return list(part) == names and all(is_part(part[name], whole[name]) for name in names)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(is_part, part, whole))
    return bool(part == whole)


@given(values, st.sampled_from([None, 1]), st.booleans())
def test_every_beginning_gives_a_part_that_grows(
    value: Any, indent: int | None, escapes: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escapes)
    parts = [closed_part(text[:end]) for end in range(len(text) + 1)]
    parts.append(closed_part(text + " "))
    assert parts[-1] == value
    for part, later in itertools.pairwise(parts):
        assert part is None or is_part(part, value)
        assert part is None or is_part(part, later)


def test_scalars_appear_when_they_are_closed() -> None:
    assert closed_part('{"a": "on') == {}
    assert closed_part('{"a": "one"') == {"a": "one"}
    assert closed_part('{"a": 12') == {}
    assert closed_part('{"a": 12,') == {"a": 12}
    assert closed_part('{"a": [1, {"b": "x", "c') == {"a": [1, {"b": "x"}]}
    assert closed_part("") is None


@pytest.mark.parametrize("text", ['{"a" 1}', "[1 2]", "{1: wrong}", "nul "])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is due at|Expecting value|Extra data"):
        closed_part(text)
