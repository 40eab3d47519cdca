"""Mask rows computed for all tokens at once are those of walking each token by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.lang.regex_parser import parse
from umbel.runtime.grammar.byte_dfa import DEAD, Budget, BuildTimeoutError, ByteDFA, build_dfa
from umbel.runtime.grammar.token_trie import StateRows, TokenRows, TokenTrie

from .regexes import random_regex

words = st.binary(max_size=5) | st.text("abc", max_size=12).map(str.encode)
vocabularies = st.lists(words, min_size=1, max_size=60)


def unpack(rows: StateRows, num_ids: int) -> list[set[int]]:
    bits = np.unpackbits(rows.rows.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, num_ids:].any()
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def alive_states(dfa: ByteDFA, tokens: list[bytes]) -> set[int]:
    """States from which some tokens in a row reach an accepting state."""
    after = [{dfa.step(s, t) for t in tokens if t} - {DEAD} for s in range(dfa.num_states)]
    alive = set(np.flatnonzero(dfa.accepting).tolist())
    while more := {s for s, targets in enumerate(after) if targets & alive} - alive:
        alive |= more
    return alive


@given(vocabularies, st.integers(0, 10_000), st.integers(0, 3))
def test_a_row_allows_the_tokens_from_which_the_text_can_be_completed(
    tokens: list[bytes], seed: int, padding: int
) -> None:
    dfa = build_dfa(parse(random_regex(random.Random(seed), 3)), Budget())
    built = TokenRows(tokens, len(tokens) + padding).build(dfa.transitions, dfa.accepting)
    alive = alive_states(dfa, tokens)
    single = {t[0] for t in tokens if len(t) == 1}
    if set(np.flatnonzero(dfa.transitions.any(axis=0)).tolist()) <= single:
        # every byte is a token: then states that bytes lead on from are alive
        assert alive == set(range(1, dfa.num_states)) or dfa.is_empty
    for state, allowed in enumerate(unpack(built, len(tokens) + padding)):
        wanted = {i for i, t in enumerate(tokens) if t and dfa.step(state, t) in alive}
        assert allowed == wanted
    if not dfa.is_empty:
        assert set(np.flatnonzero(built.alive).tolist()) == alive


def test_counters_share_rows_and_stay_exact() -> None:
    rng = random.Random(4)
    letters = [bytes([i]) for i in range(256)]
    tokens = letters + ["".join(rng.choices("ab@.", k=rng.randrange(2, 20))).encode()
                        for _ in range(300)]  # fmt: skip
    dfa = build_dfa(parse(r"[ab]{1,30}@([ab]{1,9}\.){1,3}[ab]{2,4}"), Budget())
    rows = unpack(TokenRows(tokens, len(tokens)).build(dfa.transitions, dfa.accepting), len(tokens))
    for state in range(dfa.num_states):
        wanted = {i for i, t in enumerate(tokens) if dfa.step(state, t) != DEAD}
        assert rows[state] == (wanted if state else set())


@given(vocabularies, words)
def test_the_trie_finds_prefixes_of_tokens(tokens: list[bytes], data: bytes) -> None:
    trie = TokenTrie(tokens)
    assert (trie.find(data) >= 0) == (not data or any(t.startswith(data) for t in tokens))
    node = trie.find(data)
    if node > 0 and trie.token_at[node] >= 0:
        assert tokens[trie.token_at[node]] == data
    assert trie.max_len == max(1, *map(len, tokens), 1)


@given(vocabularies, st.text("abc", min_size=1, max_size=3), st.text("abc", max_size=4))
def test_a_token_reaches_over_the_end_of_a_text_if_the_automaton_lets_it(
    tokens: list[bytes], data: str, more: str
) -> None:
    dfa = build_dfa(parse(f"{data}({more})*a?"), Budget())
    state = dfa.step(1, data.encode())
    wanted = any(
        t.startswith(data.encode())
        and len(t) > len(data)
        and dfa.step(state, t[len(data) :]) != DEAD
        for t in tokens
    )
    assert TokenTrie(tokens).continues(data.encode(), dfa.transitions, state) == wanted


def test_a_deadline_stops_the_walk() -> None:
    dfa = build_dfa(parse("a{5}"), Budget())
    with pytest.raises(BuildTimeoutError, match="rows"):
        TokenRows([b"a"], 1).build(dfa.transitions, dfa.accepting, 0.0)
