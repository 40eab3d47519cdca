from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.runtime.sampling.random_numbers import philox4x32, uniform

WORDS64 = st.integers(0, 2**64 - 1)


def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    """The paper's rounds on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # philox4x32 10 in Random123's tests/kat_vectors
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_known_answers(counter: str, key: str, words: str) -> None:
    def parse(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    def as_arrays(text: str) -> list[np.ndarray[tuple[int], np.dtype[np.uint64]]]:
        return [np.asarray([word], np.uint64) for word in parse(text)]

    assert plain_philox(parse(counter), parse(key)) == parse(words)
    assert [int(word[0]) for word in philox4x32(as_arrays(counter), as_arrays(key))] == parse(words)


@given(st.lists(st.tuples(WORDS64, WORDS64), min_size=1, max_size=20))
def test_uniform_is_the_first_word_of_each_pair_by_itself(pairs: list[tuple[int, int]]) -> None:
    numbers = uniform([seed for seed, _ in pairs], [counter for _, counter in pairs])
    for number, (seed, counter) in zip(numbers.tolist(), pairs, strict=True):
        word = plain_philox(
            [counter % 2**32, counter // 2**32, 0, 0], [seed % 2**32, seed // 2**32]
        )[0]
        assert number == word / 2**32
        assert 0 <= number < 1


def test_neighbouring_seeds_and_counters_are_not_correlated() -> None:
    grid = np.stack([uniform([seed] * 256, range(256)) for seed in range(256)])
    one = 1 / np.sqrt(12)
    for a, b in [(grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])]:
        correlation = ((a - 0.5) * (b - 0.5)).mean() / one**2
        assert abs(correlation) < 5 / 256  # five standard errors over 256 * 255 pairs
