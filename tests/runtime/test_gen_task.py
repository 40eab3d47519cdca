"""One sample: where it ends, what of it is shown, and what of it stays in the row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.engine_harness import GRAMMAR, TOKENIZER

from umbel.lang.constraints import Constraint, Regex
from umbel.lang.errors import ProgramError
from umbel.lang.ir import Gen
from umbel.lang.results import Sample
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.detokenizer import IncrementalDetokenizer
from umbel.runtime.gen_task import GenTask, check_gen
from umbel.runtime.request import Request
from umbel.runtime.sampling import SamplingRow
from umbel.runtime.stop_matcher import StopMatcher

VOCABULARY = TOKENIZER.vocabulary()
EOS = TOKENIZER.eos_ids[0]
token_ids = st.lists(
    st.sampled_from([*b"abc", *"é🙂".encode(), 0xFF, 258, 259, 260, 261, 262, 287, EOS]),
    max_size=12,
)
stop_lists = st.lists(st.sampled_from(["a", "ab", "bc", "cab", "é", "\ufffd", "🙂b"]), max_size=3)


def make_task(
    constraint: Constraint | None = None, limit: int = 10**6, **sampling: object
) -> GenTask:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return GenTask(
        gen=Gen("x", params, constraint),
        request=Request(request_id=0, program_id=0, node_id=0, token_ids=[1], limit=limit),
        detokenizer=IncrementalDetokenizer(VOCABULARY.token_bytes),
        stops=StopMatcher(params.stop, params.stop_regex),
        row=SamplingRow(params),
        end_ids=frozenset(params.stop_token_ids) | {EOS},
        encode=VOCABULARY.encode,
        matcher=None if constraint is None else GRAMMAR.compile(constraint).matcher(),
    )


def feed(task: GenTask, ids: list[int]) -> str:
    """Push ids until the sample ends, as the executor does; return what was shown."""
    shown = ""
    for token_id in ids:
        shown += task.accept(token_id)
        if task.sample is not None:
            break
        task.request.token_ids.append(token_id)
    return shown


def ended(task: GenTask) -> Sample:
    assert task.sample is not None
    return task.sample


@given(token_ids, stop_lists, st.integers(1, 12))
def test_rule_9_kept_ids_and_residue_are_the_text(
    ids: list[int], stops: list[str], max_tokens: int
) -> None:
    task = make_task(stop=tuple(stops), max_tokens=max_tokens)
    shown = feed(task, ids)
    if task.sample is None:
        assert len(ids) < max_tokens
        return
    sample = task.sample
    kept = sample.token_ids[: sample.num_kept]
    assert TOKENIZER.decode(kept) + sample.residue == sample.text
    assert sample.token_ids == tuple(ids[: len(sample.token_ids)])
    assert shown == sample.text, "rule 13: the chunks are the value"
    assert not any(stop in sample.text for stop in stops), "rule 12: the earliest stop ends it"


def test_an_end_token_ends_it_and_is_no_part_of_it() -> None:
    task = make_task()
    assert feed(task, [*b"ab", EOS]) == "ab"
    sample = ended(task)
    assert (sample.finish_reason, sample.matched_stop, sample.num_kept) == ("stop", EOS, 2)
    assert sample.token_ids == (*b"ab", EOS)


def test_rule_12_a_text_stop_counts_before_the_length() -> None:
    task = make_task(stop=("b",), max_tokens=2)
    feed(task, list(b"ab"))
    assert (ended(task).finish_reason, ended(task).matched_stop) == ("stop", "b")
    assert ended(task).text == "a"


def test_rule_12_an_end_token_settles_a_stop_that_was_waited_for() -> None:
    task = make_task(stop=("ab", "b" * 9))
    shown = feed(task, [*b"xb", EOS])
    assert shown == ended(task).text == "xb"


@pytest.mark.parametrize(("max_tokens", "limit", "length"), [(1, 99, 1), (3, 99, 3), (9, 4, 3)])
def test_it_ends_at_max_tokens_or_at_the_row_s_limit(
    max_tokens: int, limit: int, length: int
) -> None:
    task = make_task(max_tokens=max_tokens, limit=limit)
    feed(task, list(b"aaaaaaaa"))
    assert ended(task).finish_reason == "length"
    assert len(ended(task).token_ids) == length


def test_rule_9_a_stop_inside_a_token_rolls_back_to_its_border() -> None:
    (abc,) = TOKENIZER.encode_text("abc")
    task = make_task(stop=("c",))
    feed(task, [*b"x", abc])
    sample = ended(task)
    assert (sample.text, sample.num_kept, sample.residue) == ("xab", 1, "ab")


def test_rule_14_a_stop_waits_until_the_constraint_is_satisfied() -> None:
    task = make_task(Regex("a{2}b{2}c?"), stop=("b", "c"))
    shown = feed(task, list(b"aabbc"))
    sample = ended(task)
    assert (sample.text, sample.matched_stop, sample.accepting) == ("aabb", "c", True)
    assert shown == sample.text


@given(st.integers(1, 4), st.sets(st.sampled_from(list(b"abc")), min_size=1))
def test_rule_14_a_stop_token_of_an_incomplete_value_is_text(
    num_first: int, ends: set[int]
) -> None:
    task = make_task(Regex(f"[ab]{{{num_first}}}c?"), stop_token_ids=tuple(ends))
    text = list(b"abab"[:num_first])
    assert feed(task, text) == bytes(text).decode()
    assert task.sample is None  # whichever of them are stop tokens
    feed(task, [*b"c", EOS])
    sample = ended(task)
    assert sample.accepting
    assert sample.finish_reason == "stop"
    assert sample.text == bytes(text).decode() + ("" if ord("c") in ends else "c")


def test_rule_14_it_ends_where_nothing_can_follow() -> None:
    task = make_task(Regex("ab"))
    feed(task, list(b"abab"))
    assert (ended(task).text, ended(task).finish_reason, ended(task).accepting) == (
        "ab",
        "stop",
        True,
    )


def test_rule_14_a_value_that_is_cut_says_so() -> None:
    task = make_task(Regex("a{5}"), max_tokens=3)
    feed(task, list(b"aaaaa"))
    assert (ended(task).finish_reason, ended(task).accepting) == ("length", False)


@pytest.mark.parametrize(
    ("gen", "message"),
    [
        (Gen("x", SamplingParams(logit_bias=((288, 1.0),))), "logit_bias names token id 288"),
        (Gen("x", SamplingParams(stop_token_ids=(999,))), "stop_token_ids names token id 999"),
    ],
)
def test_what_the_vocabulary_can_not_honour_is_refused(gen: Gen, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        check_gen(gen, 288)
    check_gen(Gen("x", SamplingParams(logit_bias=((287, 1.0),), stop_token_ids=(0,))), 288)
