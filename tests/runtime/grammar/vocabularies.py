"""Small vocabularies whose tokenizer takes the longest token that fits."""

from __future__ import annotations

from collections.abc import Iterable

from umbel.runtime.vocabulary import Vocabulary

EOS, OTHER_EOS, SPECIAL = 0, 1, 2
NUM_SPECIAL = 3


def make_vocabulary(tokens: Iterable[bytes], *, padding: int = 5) -> Vocabulary:
    """Two EOS ids, one more special id, then the tokens, then `padding` unused ids."""
    token_bytes = (b"",) * NUM_SPECIAL + tuple(tokens)
    ids = {data: i for i, data in reversed(list(enumerate(token_bytes))) if data}
    longest = max(map(len, ids))

    def encode(text: str) -> list[int]:
        data, result = text.encode(), []
        while data:
            size = next(n for n in range(longest, 0, -1) if data[:n] in ids)
            result.append(ids[data[:size]])
            data = data[size:]
        return result

    return Vocabulary(
        token_bytes,
        frozenset(range(NUM_SPECIAL)),
        (EOS, OTHER_EOS),
        len(token_bytes) + padding,
        encode,
    )


def byte_vocabulary(*longer: str) -> Vocabulary:
    """Every byte, and some longer tokens."""
    return make_vocabulary([*(bytes([i]) for i in range(256)), *(t.encode() for t in longer)])


def abc_vocabulary() -> Vocabulary:
    """Three letters and some of their words; one word twice."""
    words = ["a", "b", "c", "ab", "bc", "aa", "abc", "cab", "ab"]
    return make_vocabulary([w.encode() for w in words])


JSON_WORDS = (
    '{"', '": ', '":', '", "', '"}', '"]', "null", "true", "name", "age", "na", "me", "12", "  ",
    '": "', ', "', "\\u", "\\n", "é", "日本", '"name": ', "[[", "]]", ', ', "red", "green", "xyz",
)  # fmt: skip


def json_vocabulary() -> Vocabulary:
    """Bytes, and tokens that reach over the borders of JSON's parts."""
    return byte_vocabulary(*JSON_WORDS)
