"""Healing by its definition: the end that is backed off, and the masks until it is rewritten."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.grammar.vocabularies import EOS, abc_vocabulary, json_vocabulary, make_vocabulary
from tests.support.engine_harness import GRAMMAR, TOKENIZER

from umbel.lang.constraints import Constraint, Regex
from umbel.runtime.grammar import GrammarCompiler, GrammarMatcher
from umbel.runtime.healing import HealedOpening, Healing, TokenPrefixes
from umbel.runtime.vocabulary import Vocabulary

# no token is "b" alone, and "ca" ends in what only longer tokens begin with
GAPS = make_vocabulary(
    [b"a", b"ab", b"abc", b"bc", b"ca", b"c", b"\xff", b"\xff\xff", b"\xff\xffx"]
)
VOCABULARIES = [abc_vocabulary(), json_vocabulary(), GAPS, TOKENIZER.vocabulary()]
vocabularies = st.sampled_from(VOCABULARIES)
PREFIXES = {id(vocabulary): TokenPrefixes(vocabulary) for vocabulary in VOCABULARIES}


def texts_of(vocabulary: Vocabulary) -> dict[int, bytes]:
    return {i: data for i, data in enumerate(vocabulary.token_bytes) if data}


def masks(healing: Healing, at: int) -> set[int]:
    bits = np.unpackbits(healing.row(at).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def can_follow(vocabulary: Vocabulary, left: bytes, matcher: GrammarMatcher | None) -> set[int]:
    """The definition: tokens that are the beginning of what is left, or begin with all of it."""
    found = set()
    for token_id, data in texts_of(vocabulary).items():
        if data.startswith(left):
            rest = data[len(left) :]
            if not rest or matcher is None or matcher.viable([rest]) == [True]:
                found.add(token_id)
        elif left.startswith(data) and can_follow(vocabulary, left[len(data) :], matcher):
            found.add(token_id)
    return found


@st.composite
def rows(draw: st.DrawFn) -> tuple[Vocabulary, list[int]]:
    vocabulary = draw(vocabularies)
    ids = st.sampled_from(sorted(texts_of(vocabulary)))
    return vocabulary, draw(st.lists(ids, min_size=1, max_size=5))


@given(rows(), st.integers(0, 12))
def test_rule_10_what_is_backed_off_covers_the_longest_end_that_a_token_goes_on_from(
    row: tuple[Vocabulary, list[int]], length: int
) -> None:
    vocabulary, ids = row
    tokens = vocabulary.token_bytes
    text = b"".join(tokens[i] for i in ids)
    literal = text[max(0, len(text) - length) :]
    count = PREFIXES[id(vocabulary)].num_to_back_off(ids, literal)
    ends = [sum(len(tokens[i]) for i in ids[len(ids) - n :]) for n in range(len(ids) + 1)]
    inside = max(end for end in ends if end <= len(literal))
    goes_on = [
        size
        for size in range(1, inside + 1)
        if any(data != text[-size:] and data.startswith(text[-size:]) for data in tokens)
    ]
    wanted = max(goes_on, default=0)
    assert ends[count] >= wanted
    assert count == 0 or ends[count - 1] < wanted


def test_rule_10_special_tokens_and_rewritten_text_are_not_backed_off() -> None:
    vocabulary = json_vocabulary()
    prefixes = TokenPrefixes(vocabulary)
    name = vocabulary.encode("na")
    assert prefixes.num_to_back_off([EOS, *name], b"na") == 1
    assert prefixes.num_to_back_off([*name, EOS], b"na") == 0
    assert prefixes.num_to_back_off([*name, vocabulary.size - 1], b"na") == 0
    assert prefixes.num_to_back_off(name, b"NA") == 0
    assert prefixes.num_to_back_off(name, b"a") == 0
    assert prefixes.num_to_back_off(name, b"") == 0


@given(rows())
def test_rule_10_a_mask_is_what_its_definition_says(row: tuple[Vocabulary, list[int]]) -> None:
    vocabulary, ids = row
    check_masks(vocabulary, ids, None)


@given(
    st.lists(st.sampled_from([*b"abc ", 259, 260, 261, 262, 263, 264]), min_size=1, max_size=4),
    st.sampled_from([Regex("[ab]{2,5}"), Regex("cab|abc|x"), Regex("(ab)*"), Regex("é?")]),
    st.sampled_from([None, "llguidance", "outlines-core"]),
)
def test_rule_10_no_token_reaches_over_the_border_into_what_the_constraint_forbids(
    ids: list[int], constraint: Constraint, engine: str | None
) -> None:
    check_masks(TOKENIZER.vocabulary(), ids, GRAMMAR.compile(constraint, engine).matcher())


def check_masks(vocabulary: Vocabulary, ids: Sequence[int], matcher: GrammarMatcher | None) -> None:
    """Follow every way through the removed bytes."""
    healing = Healing(PREFIXES[id(vocabulary)], tuple(ids), matcher)
    removed = healing.removed
    todo, seen = [0], set()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        allowed = masks(healing, at)
        assert allowed == can_follow(vocabulary, removed[at:], matcher)
        for token_id in allowed:
            opening = HealedOpening(healing, vocabulary.token_bytes)
            opening._at = at
            data = vocabulary.token_bytes[token_id]
            if len(data) < len(removed) - at:
                assert opening.accept(token_id) is None
                todo.append(at + len(data))
            else:
                assert opening.accept(token_id) == data[len(removed) - at :]


def test_a_vocabulary_may_lack_the_byte_that_a_way_would_need() -> None:
    a, ab = GAPS.encode("a")[0], GAPS.encode("ab")[0]
    healing = Healing(TokenPrefixes(GAPS), (ab,), None)
    # "a" would leave "b", which "bc" begins with
    assert a in masks(healing, 0)
    words = make_vocabulary([b"a", b"ab", b"bc", b"x", b"c"])
    compiler = GrammarCompiler(words)
    try:
        matcher = compiler.compile(Regex("x")).matcher()
    finally:
        compiler.close()
    healing = Healing(TokenPrefixes(words), tuple(words.encode("ab")), matcher)
    assert masks(healing, 0) == set(words.encode("ab")), "after 'a' no token could spell the 'b'"


@pytest.mark.parametrize("engine", [None, "llguidance", "outlines-core"])
def test_the_end_of_a_token_is_one_step_of_a_matcher(engine: str | None) -> None:
    matcher = GRAMMAR.compile(Regex("[ab]{2,5}x?"), engine).matcher()
    assert matcher.viable([b"", b"a", b"aab", b"aabbab", b"ac", b"b", b"bx", b"x"]) == [
        *(True, True, True, False, False, True, False, False)
    ]
    assert not matcher.accept_bytes(b"ac")
    assert matcher.accept_bytes(b"ab")
    assert matcher.is_accepting
    assert matcher.accept(ord("a"))
    fork = matcher.fork()
    matcher.rollback(1)
    assert matcher.accept_bytes(b"bbb")
    assert not matcher.accept(ord("a"))
    fork.rollback(2)
    assert not fork.is_accepting
    assert not fork.accept_bytes(b"x")
    with pytest.raises(ValueError, match="take back"):
        fork.rollback(1)
