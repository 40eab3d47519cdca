"""Lone surrogates are refused where they are given: no text of a model has one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

import umbel as ub
from umbel.lang.errors import ConstraintError
from umbel.lang.unicode_check import check_json, lone_surrogate

LONE = "\udb40"


class Marks(enum.Enum):
    A = "a"
    B = LONE


class Keyed(TypedDict):
    mark: Marks


def encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


ANY_TEXT = st.text(st.characters() | st.characters(categories=["Cs"]))


@given(ANY_TEXT)
def test_a_lone_surrogate_is_what_utf_8_can_not_encode(text: str) -> None:
    at = lone_surrogate(text)
    assert (at is None) == encodes(text)
    if at is not None:
        assert encodes(text[:at])
        assert not encodes(text[at])


@given(st.recursive(ANY_TEXT | st.none(), lambda x: st.lists(x) | st.dictionaries(ANY_TEXT, x)))
def test_a_json_value_is_refused_exactly_where_it_has_one(value: Any) -> None:
    def texts(item: Any) -> str:
        if isinstance(item, dict):
            return "".join([*item, *map(texts, item.values())])
        return "".join(map(texts, item)) if isinstance(item, list) else item or ""

    try:
        check_json(value, "value")
    except ConstraintError:
        assert not encodes(texts(value))
    else:
        assert encodes(texts(value))


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: ub.gen("a", choices=["b", "c" + LONE]), "position 1"),
        (lambda: ub.select("a", ["b", LONE]), "position 0"),
        (lambda: ub.select("a", ["b", "c"], terminator=LONE), "position 0"),
        (lambda: ub.gen("a", stop=["x", "yz" + LONE]), "position 2"),
        (lambda: ub.gen("a", stop_regex=LONE), "position 0"),
        (lambda: ub.gen("a", regex="b|" + LONE), "position 2"),
        (lambda: ub.gen("a", regex=r"b|\udb40"), "position 2"),
        (lambda: ub.gen("a", regex=r"b|\U0000DB40"), "position 2"),
        (lambda: ub.gen("a", regex=r"b|[a\udc00]"), "position 4"),
        (lambda: ub.gen("a", schema=Literal["b", "\udb40"]), "position 0"),
        (lambda: ub.gen("a", schema=Marks), "position 0"),
        (lambda: ub.gen("a", schema={"anyOf": [{"enum": ["b", LONE]}]}), "/anyOf/0/enum/1"),
        (lambda: ub.gen("a", schema='{"const": {"b": "\\udb40"}}'), "/const/b"),
        (lambda: ub.gen("a", schema={"properties": {LONE: {}}}), "/properties"),
        (lambda: ub.gen("a", schema=list[Literal["b", "\udb40"]]), ""),
        (lambda: ub.gen("a", schema=Keyed), None),
        (lambda: ub.gen("a", grammar=f'start: "{LONE}"'), "line 1, column 9"),
        (lambda: ub.gen("a", grammar=f'root ::= "{LONE}"'), "line 1, column 11"),
    ],
)
def test_a_constraint_with_a_lone_surrogate_is_refused_by_name(
    make: Callable[[], object], where: str | None
) -> None:
    with pytest.raises(ConstraintError, match="surrogate") as caught:
        make()
    assert where is None or caught.value.where == where
    assert encodes(str(caught.value))


def test_what_only_looks_like_a_surrogate_is_taken() -> None:
    for pattern in (r"\\ud800", r"[\\]ud800", r"\ud83d\ude00", "\U0001f600", r"\ud7ff"):
        ub.gen("a", regex=pattern)
    ub.gen("a", choices=["\U0001f600", "\ud7ff", "\ue000"])
    ub.gen("a", schema='{"enum": ["\\ud83d\\ude00", "\\\\ud800"]}')
