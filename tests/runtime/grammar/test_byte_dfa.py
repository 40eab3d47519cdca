"""Automata are exact, minimal, trimmed, and stop at their budget."""

from __future__ import annotations

import itertools
import random
import re
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.lang import regex_syntax as rx
from umbel.lang.regex_parser import parse
from umbel.runtime.grammar.byte_dfa import (
    DEAD,
    START,
    Budget,
    BuildTimeoutError,
    ByteDFA,
    TooManyStatesError,
    build_dfa,
    utf8_ranges,
    without_bytes,
)

from .regexes import random_regex

TEXTS = ["".join(p) for n in range(7) for p in itertools.product("abc", repeat=n)]
code_points = st.integers(0, 0x10FFFF)
ranges = st.lists(st.tuples(code_points, code_points).map(sorted), max_size=4)


def language(dfa: ByteDFA) -> set[str]:
    return {text for text in TEXTS if dfa.matches(text.encode())}


def regex_language(pattern: str) -> set[str]:
    oracle = re.compile(pattern, re.ASCII)
    return {text for text in TEXTS if oracle.fullmatch(text)}


@given(ranges, st.lists(code_points, max_size=20))
def test_byte_sequences_cover_exactly_the_code_points(
    pairs: list[list[int]], samples: list[int]
) -> None:
    found = rx.normalise((low, high) for low, high in pairs)
    sequences = utf8_ranges(found)
    edges = [e for low, high in pairs for e in (low - 1, low, low + 1, high - 1, high, high + 1)]
    for code in [*samples, *edges, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000]:
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            continue
        data = chr(code).encode()
        hits = [
            s
            for s in sequences
            if len(s) == len(data)
            and all(low <= b <= high for (low, high), b in zip(s, data, strict=True))
        ]
        assert len(hits) == any(low <= code <= high for low, high in pairs)


@given(ranges)
def test_complement_and_intersection_of_ranges(pairs: list[list[int]]) -> None:
    found = rx.normalise((low, high) for low, high in pairs)
    assert rx.complement(rx.complement(found)) == found
    assert rx.intersect(found, rx.complement(found)) == ()
    assert rx.intersect(found, rx.ANY.ranges) == found


def test_random_regexes_match_what_re_matches() -> None:
    rng = random.Random(1)
    for _ in range(150):
        pattern = random_regex(rng, rng.randrange(1, 5))
        assert language(build_dfa(parse(pattern), Budget())) == regex_language(pattern), pattern


def test_intersection_and_difference_are_those_of_the_languages() -> None:
    rng = random.Random(2)
    for _ in range(100):
        left, right = random_regex(rng, 3), random_regex(rng, 3)
        both = build_dfa(rx.Both(parse(left), parse(right)), Budget())
        without = build_dfa(rx.Without(parse(left), parse(right)), Budget())
        assert language(both) == regex_language(left) & regex_language(right)
        assert language(without) == regex_language(left) - regex_language(right)


def test_an_intersection_works_inside_a_larger_regex() -> None:
    inner = rx.Both(parse("[ab]{2,3}"), parse(".*b"))
    dfa = build_dfa(rx.concat([rx.literal("c"), rx.repeat(inner, 1, 2), rx.literal("c")]), Budget())
    assert language(dfa) == regex_language("c(?:(?:[ab]b|[ab]{2}b)){1,2}c")


def test_no_two_states_accept_the_same_texts_and_all_are_reached_and_alive() -> None:
    rng = random.Random(3)
    for _ in range(60):
        dfa = build_dfa(parse(random_regex(rng, 3)), Budget())
        table, accepting = dfa.transitions, dfa.accepting
        differ = accepting[:, None] != accepting[None, :]  # table filling (Moore, 1956)
        while True:
            more = differ | differ[table[:, None, :], table[None, :, :]].any(axis=2)
            if (more == differ).all():
                break
            differ = more
        assert (differ | np.eye(dfa.num_states, dtype=np.bool_)).all()
        # different from the dead state, which accepts nothing: so all others are alive
        assert set(table[1:].flat) | {DEAD, START} == set(range(dfa.num_states))
        assert not table[DEAD].any()
        assert not accepting[DEAD]


@pytest.mark.parametrize("node", [rx.NEVER, rx.Both(parse("a"), parse("b"))])
def test_the_empty_language_is_a_start_without_transitions(node: rx.Node) -> None:
    dfa = build_dfa(node, Budget())
    assert dfa.is_empty
    assert dfa.num_states == 2
    assert not dfa.transitions.any()


def test_texts_with_unusable_bytes_are_cut_out() -> None:
    usable = np.ones(256, np.bool_)
    usable[ord("b")] = False
    dfa = without_bytes(build_dfa(parse("a(b|cc)?|bb"), Budget()), usable, Budget())
    assert language(dfa) == {"a", "acc"}
    assert dfa.num_states == build_dfa(parse("a(cc)?"), Budget()).num_states


@pytest.mark.parametrize(
    "pattern", ["[ab]*a[ab]{18}", "((a{1,100}){1,100}){1,100}", "(a|b|c){0,100000}"]
)
def test_a_budget_of_states_stops_an_explosion_at_once(pattern: str) -> None:
    budget = Budget(max_states=2_000, max_nfa_states=20_000)
    all_work = budget.work
    with pytest.raises(TooManyStatesError):
        build_dfa(parse(pattern), budget)
    assert all_work - budget.work < 50_000


def test_a_deadline_stops_a_build() -> None:
    with pytest.raises(BuildTimeoutError, match="automaton"):
        build_dfa(parse(".{0,300}"), Budget(deadline=time.monotonic() - 1))


def test_state_numbers_start_with_the_dead_one_and_the_start() -> None:
    dfa = build_dfa(parse("ab"), Budget())
    assert dfa.step(START, b"a") == 2
    assert dfa.step(START, b"ab") == 3
    assert dfa.step(START, b"b") == DEAD
