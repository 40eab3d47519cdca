"""Rule 12: the result of a stop depends neither on the order of stops nor on how text arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from umbel.interpreter.stop_filter import StopFilter
from umbel.runtime.stop_matcher import StopMatcher

texts = st.text("ab,9 ", max_size=12)
stop_lists = st.lists(st.text("ab,9 ", min_size=1, max_size=4), min_size=1, max_size=4, unique=True)


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    stop_filter = StopFilter(stops)
    chunks = [stop_filter.feed(piece) for piece in pieces]
    if stop_filter.matched is None:
        chunks.append(stop_filter.finish())
    return "".join(chunks), stop_filter.matched, chunks


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@given(texts, stop_lists, st.data())
def test_pieces_and_order_change_nothing(text: str, stops: list[str], data: st.DataObject) -> None:
    whole = feed(stops, [text])[:2]
    assert feed(data.draw(st.permutations(stops)), cut(text, data))[:2] == whole


@given(texts, stop_lists, st.data())
def test_text_ends_before_the_stop_that_begins_first(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    value, matched, _ = feed(stops, cut(text, data))
    places = [(at, len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not places:
        assert (value, matched) == (text, None)
        return
    start, _, first = min(places)
    assert (value, matched) == (text[:start], first)


@given(texts, stop_lists, st.data())
def test_the_engine_finds_the_same_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    value, matched, _ = feed(stops, cut(text, data))
    matcher = StopMatcher(stops)
    engine = "".join([matcher.push(piece) for piece in cut(text, data)]) + matcher.flush()
    assert (engine, matcher.match and matcher.match.stop) == (value, matched)


@given(texts, stop_lists, st.data())
def test_only_what_may_become_a_stop_is_held_back(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    stop_filter = StopFilter(stops)
    seen = given_out = ""
    for piece in cut(text, data):
        seen += piece
        given_out += stop_filter.feed(piece)
        if stop_filter.matched is not None:
            return
        held = seen.removeprefix(given_out)
        assert held == "" or any(s.startswith(held) and s != held for s in stops)
