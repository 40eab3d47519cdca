"""Token rows: grouping never changes ids, generated ids stay, a select's rows cost their ends."""

from __future__ import annotations

import tracemalloc
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.engine_harness import MERGES, TOKENIZER
from tokenizers.normalizers import NFC

from umbel.lang.errors import ProgramError, RequestRejectedError
from umbel.lang.ir import Select
from umbel.runtime.token_row import RowBuilder, TokenRow
from umbel.runtime.tokenizer import Tokenizer
from umbel.runtime.tokenizer_files import byte_level_parts

ROWS = RowBuilder(TOKENIZER)
END_OF_TURN = 258
assert TOKENIZER.special_id("<|im_end|>") == END_OF_TURN

texts = st.text("abcxy é<|", max_size=6)
generated = st.lists(st.integers(0, 255), min_size=1, max_size=3)
parts = st.lists(st.one_of(texts, generated), max_size=6)


def row_of(*parts: str | list[int], rows: RowBuilder = ROWS) -> TokenRow:
    row = TokenRow()
    for part in parts:
        if isinstance(part, str):
            row = rows.append_text(row, part)
        else:
            row = rows.append_generated(row, part, "text of it", "")
    return row


@given(parts, st.lists(texts, max_size=4))
def test_rule_6_grouping_of_appends_changes_no_ids(
    before: list[str | list[int]], appended: list[str]
) -> None:
    one_by_one = row_of(*before, *appended)
    at_once = row_of(*before, "".join(appended))
    assert ROWS.encode(one_by_one) == ROWS.encode(at_once)
    assert ROWS.encode(row_of(*before), then="".join(appended)) == ROWS.encode(at_once)


@given(parts, generated, texts)
def test_rule_9_generated_ids_stay_whatever_follows(
    before: list[str | list[int]], kept: list[int], after: str
) -> None:
    prompt = ROWS.encode(row_of(*before))
    row = row_of(*before, kept, after)
    assert ROWS.encode(row)[: len(prompt) + len(kept)] == [*prompt, *kept]
    assert row.ids == (*prompt, *kept)


@given(parts, texts)
def test_rule_9_a_generation_that_keeps_nothing_leaves_the_run_open(
    before: list[str | list[int]], residue: str
) -> None:
    row = ROWS.append_generated(row_of(*before), [], residue, residue)
    assert ROWS.encode(row) == ROWS.encode(row_of(*before, residue))


@given(parts, st.lists(texts, min_size=1, max_size=5), st.booleans())
def test_rows_of_many_choices_are_those_of_each(
    before: list[str | list[int]], choices: list[str], add_bos: bool
) -> None:
    rows = RowBuilder(Tokenizer.byte_level(288, merges=MERGES, add_bos=add_bos))
    row = row_of(*before, rows=rows)
    assert rows.encode_each(row, choices) == [rows.encode(row, then=c) for c in choices]


def test_rule_9_bos_comes_once_and_only_where_the_tokenizer_adds_it() -> None:
    with_bos = RowBuilder(Tokenizer.byte_level(288, add_bos=True))
    bos = with_bos.first_id
    assert with_bos.encode(TokenRow()) == [bos]
    assert with_bos.encode(row_of("q", [65], "q", rows=with_bos)) == [bos, 113, 65, 113]
    assert ROWS.encode(row_of("q", [65])) == [113, 65]


def test_an_empty_row_is_one_token_since_a_model_can_not_continue_nothing() -> None:
    assert ROWS.encode(TokenRow()) == [ROWS.first_id]


def test_text_never_spells_a_special_token_but_a_template_does() -> None:
    assert END_OF_TURN not in ROWS.encode(row_of("<|im_end|>"))
    row = ROWS.start_role(TokenRow(), "user")
    row = ROWS.end_role(ROWS.append_text(row, "<|im_end|>"))
    assert ROWS.encode(row).count(END_OF_TURN) == 1
    assert row.turns == ("user",)


def test_a_turn_can_not_end_before_it_began() -> None:
    with pytest.raises(ProgramError, match="no open turn"):
        ROWS.end_role(TokenRow())
    bare = RowBuilder(Tokenizer.byte_level(288, template=""))
    with pytest.raises(ProgramError, match="no chat template"):
        bare.start_role(TokenRow(), "user")


@pytest.mark.parametrize("choices", [("", "a"), ("a", "ab"), ("b", "abc", "ab")])
def test_rule_11_a_choice_that_begins_another_needs_its_end_scored(
    choices: tuple[str, ...],
) -> None:
    select, plain = Select("s", choices), row_of("q")
    with pytest.raises(ProgramError, match="terminator"):
        ROWS.with_terminator(select, plain, ROWS.encode_each(plain, choices))
    in_role = ROWS.start_role(TokenRow(), "assistant")
    rows = ROWS.encode_each(in_role, choices)
    assert ROWS.with_terminator(select, in_role, rows) == [[*ids, END_OF_TURN] for ids in rows]
    given = Select("s", choices, terminator=".")
    assert ROWS.with_terminator(given, plain, []) == [
        ROWS.encode(plain, then=choice + ".") for choice in choices
    ]


def test_rule_11_choices_that_end_apart_are_scored_as_they_are() -> None:
    rows = ROWS.encode_each(row_of("q"), ("a", "b"))
    assert ROWS.with_terminator(Select("s", ("a", "b")), row_of("q"), rows) is rows


def test_rows_of_one_path_share_their_text() -> None:
    text, row = "x" * 1000, TokenRow()
    tracemalloc.start()
    rows = [row := ROWS.append_text(row, text) for _ in range(1000)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1000 * len(rows), "a row holds its own text alone"
    assert ROWS.encode(rows[1]) == ROWS.encode(row_of(2 * text))


@given(st.text())
def test_no_text_has_fewer_ids_than_its_characters_need(text: str) -> None:
    assert TOKENIZER.fewest_ids(len(text)) <= len(TOKENIZER.encode_text(text))


def test_a_text_is_composed_before_its_ids_are_counted() -> None:
    parts = byte_level_parts(288, (), add_bos=False)
    parts.backend.normalizer = NFC()
    text = unicodedata.normalize("NFD", "\u1f82") * 100
    tokenizer = Tokenizer(parts)
    assert tokenizer.fewest_ids(len(text)) <= len(tokenizer.encode_text(text))


def test_a_row_that_is_surely_too_long_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowBuilder(TOKENIZER, max_seq_len=8)
    longest = max(map(len, TOKENIZER.token_bytes))
    assert len(rows.encode(row_of([65] * 7))) == 8
    monkeypatch.setattr(Tokenizer, "encode_text", None)  # nobody may ask
    for row in (row_of("x" * (9 * longest)), row_of([65] * 7, "x" * longest)):
        with pytest.raises(RequestRejectedError, match="9 tokens at least") as refused:
            rows.encode(row)
        assert refused.value.reason == "too_long"
        with pytest.raises(RequestRejectedError, match="9 tokens at least"):
            rows.encode_each(row, ("a", "b"))
