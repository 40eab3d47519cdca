"""The vocabulary's trie finds what a search through all tokens finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from umbel.lang.regex_parser import parse
from umbel.runtime.grammar.byte_dfa import DEAD, Budget, build_dfa
from umbel.runtime.grammar.token_trie import TokenTrie

words = st.binary(max_size=5) | st.text("abc", max_size=12).map(str.encode)
vocabularies = st.lists(words, min_size=1, max_size=60)


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
