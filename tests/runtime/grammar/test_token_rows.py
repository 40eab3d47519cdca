"""Mask rows computed for all tokens at once are those of walking each token by itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.lang.regex_parser import parse
from umbel.runtime.grammar import token_rows
from umbel.runtime.grammar.byte_dfa import DEAD, Budget, BuildTimeoutError, ByteDFA, build_dfa
from umbel.runtime.grammar.token_rows import StateRows, TokenRows

from .regexes import random_regex
from .test_token_trie import vocabularies


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


@pytest.mark.parametrize(
    "pattern", [r"[a-z]{2,9}(-[0-9a-f]{1,4})*", r"id|name|(q|z)[^k-p]*x{0,20}"]
)
def test_merging_bytes_that_no_state_tells_apart_changes_no_row(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)
    tokens = [bytes([i]) for i in range(256)]
    tokens += ["".join(rng.choices("abcdefghijknpxz0f9-", k=rng.randrange(2, 14))).encode()
               for _ in range(3_000)]  # fmt: skip
    tokens += tokens[300:310]  # twins
    dfa = build_dfa(parse(pattern), Budget())
    found = []
    for times_fewer, lookups in ((0, 10**9), (10**9, 0)):  # always merged, never
        monkeypatch.setattr(token_rows, "_TIMES_FEWER", times_fewer)
        monkeypatch.setattr(token_rows, "_LOOKUPS", lookups)
        found.append(TokenRows(tokens, len(tokens)).build(dfa.transitions, dfa.accepting).rows)
    assert np.array_equal(found[0], found[1])
    assert any(allowed.sum() > 300 for allowed in np.unpackbits(found[0].view(np.uint8), axis=1))


def test_a_deadline_stops_the_walk() -> None:
    dfa = build_dfa(parse("a{5}"), Budget())
    with pytest.raises(BuildTimeoutError, match="rows"):
        TokenRows([b"a"], 1).build(dfa.transitions, dfa.accepting, 0.0)
