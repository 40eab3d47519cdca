from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.lang.errors import ConstraintError, ProgramError
from umbel.runtime.stop_matcher import StopMatch, StopMatcher

texts = st.text(alphabet="abc\n", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc\n", min_size=1, max_size=5), min_size=1, max_size=4)
PATTERNS = [r"a+b", r"a.*b", r"b\n", r"(?<=c)a", r"ab(?=c)", r"c\b", r"[ab]{2,3}c", r"a|bcb", r"a$"]
pattern_lists = st.lists(st.sampled_from(PATTERNS), max_size=2)


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    """Split a text after every sum of sizes."""
    at = [0, *accumulate(sizes)]
    return [text[i:j] for i, j in zip(at, [*at[1:], len(text)], strict=True)]


def run(matcher: StopMatcher, deltas: Sequence[str]) -> tuple[str, StopMatch | None]:
    text = "".join([*map(matcher.push, deltas), matcher.flush()])
    return text, matcher.match


def first_stop(text: str, stops: Sequence[str]) -> StopMatch | None:
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    return StopMatch(min(found)[0], min(found)[2]) if found else None


@given(texts, stop_lists, st.lists(st.integers(0, 5)))
def test_any_split_and_any_order_give_the_first_stop_of_the_whole_text(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    match = first_stop(text, stops)
    kept = text if match is None else text[: match.length]
    assert run(StopMatcher(stops), cut(text, sizes)) == (kept, match)
    assert run(StopMatcher(stops[::-1]), cut(text, sizes)) == (kept, match)


@given(texts, stop_lists)
def test_only_a_proper_prefix_of_a_stop_is_withheld(text: str, stops: list[str]) -> None:
    matcher, released, given_so_far = StopMatcher(stops), "", ""
    for char in text:
        released += matcher.push(char)
        given_so_far += char
        if matcher.match is not None:
            break
        assert given_so_far.startswith(released)
        assert matcher.num_released == len(released)
        withheld = given_so_far[len(released) :]
        assert any(s != withheld and s.startswith(withheld) for s in stops)


def first_end(text: str, stops: Sequence[str], patterns: Sequence[str]) -> tuple[str, int | None]:
    """Follow the definition in the module's docstring, on every prefix of the text."""
    best: int | None = None
    for end in range(1, len(text) + 1):
        so_far = text[:end]
        starts = [m.start() for p in patterns if (m := re.search(p, so_far))]
        starts += [so_far.find(stop) for stop in stops if stop in so_far]
        best = min(starts, default=best) if best is None else min([best, *starts])
        may_complete = (
            end - n for stop in stops for n in range(1, len(stop)) if so_far.endswith(stop[:n])
        )
        if best is not None and not any(at < best for at in may_complete):
            break
    return (text, None) if best is None else (text[:best], best)


@given(
    texts, st.lists(st.text("abc", min_size=1, max_size=4), max_size=2), pattern_lists, st.data()
)
def test_patterns_end_the_text_at_the_same_place_for_any_split(
    text: str, stops: list[str], patterns: list[str], data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5)))
    kept, match = run(StopMatcher(stops, patterns), cut(text, sizes))
    assert (kept, match and match.length) == first_end(text, stops, patterns)


def test_a_stop_that_is_split_over_deltas_is_not_streamed() -> None:
    matcher = StopMatcher([", 9"])
    assert [matcher.push(delta) for delta in ("7", ", 8", ",", " ", "9", " x")] == [
        *("7", ", 8", "", "", "", "")
    ]
    assert matcher.match == StopMatch(4, ", 9")


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_the_earliest_stop_wins_in_either_order(stops: list[str]) -> None:
    assert run(StopMatcher(stops), ["x", "ab", "y"]) == ("x", StopMatch(1, "ab"))


def test_a_longer_stop_that_began_earlier_is_waited_for() -> None:
    assert run(StopMatcher(["c", "abcd"]), ["abc", "d"]) == ("", StopMatch(0, "abcd"))
    assert run(StopMatcher(["c", "abcd"]), ["abc", "e"]) == ("ab", StopMatch(2, "c"))
    assert run(StopMatcher(["c", "abcd"]), ["abc"]) == ("ab", StopMatch(2, "c"))


def test_a_pattern_withholds_from_where_it_may_begin() -> None:
    matcher = StopMatcher(regexes=[r"\n\s*END"])
    assert [matcher.push(delta) for delta in ("one", "\n", "  ", "two", "\n EN", "D")] == [
        *("one", "", "", "\n  two", "", "")
    ]
    assert matcher.match == StopMatch(9, r"\n\s*END")


def test_a_look_behind_sees_text_that_was_released() -> None:
    assert run(StopMatcher(regexes=["(?<=ab)c"]), ["a", "b", "c"])[0] == "ab"


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ProgramError, match="empty string"):
        StopMatcher(["a", ""])


@pytest.mark.parametrize(
    ("pattern", "message"), [("a*", "matches the empty text"), ("(a", "no regular expression")]
)
def test_a_pattern_that_cannot_be_used_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ConstraintError, match=message):
        StopMatcher(regexes=[pattern])


def test_a_pattern_that_explodes_fails_by_name() -> None:
    matcher = StopMatcher(regexes=["(a|a|a|aa)+c"])
    with pytest.raises(ConstraintError, match="took over 1 s"):
        matcher.push("a" * 60)
