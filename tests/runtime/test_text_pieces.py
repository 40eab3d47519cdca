"""The cache of encoded pieces: what was used last stays, up to a number of ids."""

from __future__ import annotations

import threading

import pytest

from umbel.runtime.text_pieces import PieceCache


class Encoder:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str) -> tuple[int, ...]:
        self.asked.append(text)
        if text == "bad":
            raise ValueError(text)
        return tuple(text.encode())


def test_the_piece_used_longest_ago_goes_first() -> None:
    encoder = Encoder()
    cache = PieceCache(encoder, max_pieces=9, max_ids=6)
    for text in ("aaa", "bb", "aaa", "cc", "aaa", "bb"):
        assert cache.encode(text) == tuple(text.encode())
    assert encoder.asked == ["aaa", "bb", "cc", "bb"]
    assert cache.num_ids == 5


def test_a_piece_that_is_too_long_pushes_nothing_out() -> None:
    encoder = Encoder()
    cache = PieceCache(encoder, max_pieces=9, max_ids=4)
    for text in ("aaa", "toolong", "aaa", "toolong"):
        cache.encode(text)
    assert encoder.asked == ["aaa", "toolong", "toolong"]
    assert cache.num_ids == 3


def test_short_pieces_do_not_pile_up() -> None:
    encoder = Encoder()
    cache = PieceCache(encoder, max_pieces=2, max_ids=100)
    for text in ("", "a", "b", "b", "a", ""):
        cache.encode(text)
    assert encoder.asked == ["", "a", "b", ""]
    assert cache.num_ids == 1


def test_a_text_that_can_t_be_encoded_is_asked_for_again() -> None:
    encoder = Encoder()
    cache = PieceCache(encoder, max_pieces=9, max_ids=4)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            cache.encode("bad")
    assert encoder.asked == ["bad", "bad"]
    assert cache.num_ids == 0


def test_two_threads_that_encode_one_piece_count_it_once() -> None:
    both = threading.Barrier(2, timeout=10)

    def encode(text: str) -> tuple[int, ...]:
        both.wait()
        return tuple(text.encode())

    cache = PieceCache(encode, max_pieces=9, max_ids=10)
    threads = [threading.Thread(target=cache.encode, args=("abc",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.num_ids == 3
    assert cache.encode("abc") == tuple(b"abc")
