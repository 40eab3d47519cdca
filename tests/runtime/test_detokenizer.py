from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from umbel.runtime.detokenizer import IncrementalDetokenizer

# Id i is byte i; 256 is a special token, and ids above are padding.
BYTES = [*(bytes([i]) for i in range(256)), b""]

# Valid text, literal U+FFFD, and byte salad, in any mixture.
raw_bytes = st.lists(
    st.one_of(
        st.text(max_size=3).map(str.encode), st.binary(max_size=3), st.just("\ufffd".encode())
    )
).map(b"".join)


@given(raw_bytes)
def test_the_pieces_make_up_the_text_of_all_bytes(raw: bytes) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    pieces = [detokenizer.push(byte) for byte in raw]
    assert "".join([*pieces, detokenizer.flush()]) == raw.decode("utf-8", "replace")


@given(st.text())
def test_a_character_flows_with_its_last_byte(text: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    for char in text:
        pieces = []
        for byte in char.encode("utf-8", "replace"):
            pieces.append(detokenizer.push(byte))
            assert detokenizer.is_clean == (pieces[-1] != "")
        assert pieces == [""] * (len(pieces) - 1) + [char.encode("utf-8", "replace").decode()]
    assert detokenizer.flush() == ""


@given(raw_bytes, st.integers(0, 100), st.sampled_from([256, 257, 100_000]))
def test_special_and_padding_ids_have_no_text(raw: bytes, at: int, extra: int) -> None:
    ids = list(raw)
    ids.insert(at % (len(ids) + 1), extra)
    detokenizer = IncrementalDetokenizer(BYTES)
    text = "".join([*map(detokenizer.push, ids), detokenizer.flush()])
    assert text == raw.decode("utf-8", "replace")


def test_a_flush_ends_a_character_that_was_cut_and_starts_anew() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert [detokenizer.push(byte) for byte in "🙂".encode()[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.push(ord("a")) == "a"
