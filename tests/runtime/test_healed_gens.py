"""Token healing in the engine, against its definition on hash logits, id by id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import (
    TOKENIZER,
    Collector,
    check_idle,
    drive,
    make_engine,
    make_runner,
    open_run,
    run_graphs,
)
from tests.support.graphs import chain

from umbel.lang.constraints import Constraint, JsonSchema, Regex
from umbel.lang.ir import Gen, Op, Pick, RoleEnd, RoleStart, Text
from umbel.lang.results import NodeResult, RunOptions, Sample
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.healing import TokenPrefixes

TOKENS = TOKENIZER.token_bytes
EOS = min(TOKENIZER.eos_ids)
PREFIXES = TokenPrefixes(TOKENIZER.vocabulary())
PROMPTS = st.sampled_from(["a", "ab", "x", "xyxa", "b ", "aab", "no", "é", "abcab", " ", "zz"])


def run(*ops: Op, **options: Any) -> Collector:
    engine = make_engine(**options)
    _, collector = open_run(engine, chain(*ops), seed=5)
    drive(engine)
    check_idle(engine)
    assert collector.errors == {}
    return collector


def backed_off(prompt: list[int], literal: str) -> tuple[list[int], bytes]:
    count = PREFIXES.num_to_back_off(prompt, literal.encode())
    removed = b"".join(TOKENS[i] for i in prompt[len(prompt) - count :])
    return prompt[: len(prompt) - count] or [EOS], removed


def by_definition(prompt: list[int], removed: bytes, gen: Gen) -> list[int]:
    """Sample greedily, one id at a time, from what the definition of a healed gen allows."""
    runner = make_runner()
    pattern = gen.constraint.pattern if isinstance(gen.constraint, Regex) else None

    def may_begin(value: bytes) -> bool:
        if pattern is None:
            return True
        text = value.decode("latin-1")  # the patterns here are ASCII
        return regex.fullmatch(pattern, text, partial=True) is not None

    ids: list[int] = []
    text, num_of_value = b"", 0
    while num_of_value < gen.sampling.max_tokens:
        logits = runner.logits_of([*prompt, *ids])
        is_open = len(text) < len(removed)
        allowed = np.full(len(logits), not is_open and pattern is None)
        for token_id, data in enumerate(TOKENS):
            after = text + data
            if is_open:
                fits = removed.startswith(after) or after.startswith(removed)
                value = after[len(removed) :]
                allowed[token_id] = bool(data) and fits and may_begin(value)
            elif pattern is not None:
                allowed[token_id] = bool(data) and may_begin(after[len(removed) :])
        if not is_open:
            value = text[len(removed) :]
            is_complete = pattern is None or regex.fullmatch(pattern, value.decode("latin-1"))
            is_early = num_of_value < gen.sampling.min_tokens
            for eos_id in TOKENIZER.eos_ids:
                allowed[eos_id] = is_complete and not is_early
            if pattern is not None and is_complete and allowed.sum() == len(TOKENIZER.eos_ids):
                break
        logits[~allowed] = -np.inf
        token_id = int(logits.argmax())
        ids.append(token_id)
        if token_id in TOKENIZER.eos_ids:
            break
        text += TOKENS[token_id] if token_id < len(TOKENS) else b""
        num_of_value += not is_open or len(text) > len(removed)
    return ids


def row_after(prompt: list[int], sample: Sample, then: str, literal: str) -> list[int]:
    """Return the row of rule 9: the prompt without what is replaced, the kept ids, the rest."""
    kept = list(sample.token_ids[: sample.num_kept])
    if not kept:
        return TOKENIZER.encode_text(literal + sample.residue + then)
    before = prompt[: len(prompt) - sample.num_replaced] or [EOS]
    return [*before, *kept, *TOKENIZER.encode_text(sample.residue + then)]


@settings(max_examples=60, deadline=None)
@given(
    PROMPTS,
    st.sampled_from([None, Regex("[ab]{2,5}"), Regex("[a-c ]{0,4}"), Regex("x?[yz]*")]),
    st.integers(1, 6),
    st.integers(0, 1),
    st.sampled_from([(), ("a",), ("b", "ab"), ("y",)]),
)
def test_rule_10_a_healed_gen_is_what_its_definition_says(
    prompt: str,
    constraint: Constraint | None,
    max_tokens: int,
    min_tokens: int,
    stop: tuple[str, ...],
) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, stop=stop)
    healed = Gen("x", sampling, constraint, heal=True)
    after = Gen("y", SamplingParams(max_tokens=3))
    collector = run(Text((prompt,)), healed, Text(("bc",)), after)
    sample = collector.results[1].samples[0]
    ids = TOKENIZER.encode_text(prompt)
    start, removed = backed_off(ids, prompt)
    expected = by_definition(start, removed, healed)
    if sample.matched_stop in stop:
        assert list(sample.token_ids) == expected[: len(sample.token_ids)]
    else:
        assert list(sample.token_ids) == expected
    sampled = b"".join(TOKENS[i] for i in sample.token_ids if i < len(TOKENS))
    assert sampled.startswith(removed), "the literal is written again before anything else"
    value = sampled[len(removed) :].decode("utf-8", "replace")
    assert value.startswith(sample.text)
    if not isinstance(sample.matched_stop, str):
        assert value.rstrip("\ufffd") == sample.text.rstrip("\ufffd")
    assert collector.deltas.get(1, "") == sample.text, "no healed byte is ever shown"
    # inside a value that is not complete a stop is text (rule 14)
    assert constraint or not any(text in sample.text for text in stop)
    if isinstance(constraint, Regex) and sample.accepting:
        assert regex.fullmatch(constraint.pattern, sample.text)
    # what comes later sees the sampled ids as they are
    row = row_after(ids, sample, "bc", prompt)
    (then,) = collector.results[3].samples
    assert list(then.token_ids) == by_definition(row, b"", after)


def test_rule_10_a_longer_token_takes_the_literal_s_place() -> None:
    """With "a" backed off, "ab" or "abc" may come: the value is what lies behind the "a"."""
    bias = {TOKENIZER.encode_text("abc")[0]: 100.0}
    sampling = SamplingParams(max_tokens=1, logit_bias=tuple(bias.items()), logprobs=True)
    collector = run(Text(("xya",)), Gen("x", sampling, heal=True), Gen("y", sampling))
    (sample,) = collector.results[1].samples
    assert sample.text == "bc"
    assert (sample.num_kept, sample.num_replaced) == (1, 1)
    assert [lp.token_id for lp in sample.logprobs] == list(sample.token_ids)
    usage = collector.results[1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (1, 1)
    (then,) = collector.results[2].samples
    assert then.token_ids[0] == next(iter(bias))


def test_rule_10_only_tokens_of_the_value_count() -> None:
    """The literal's own token is likeliest: sampled again, it counts for no limit."""
    (a,) = TOKENIZER.encode_text("a")
    sampling = SamplingParams(
        max_tokens=2, min_tokens=2, logit_bias=((a, 50.0), (EOS, 40.0)), logprobs=True
    )
    (sample,) = run(Text(("xya",)), Gen("x", sampling, heal=True)).results[1].samples
    assert sample.text == "aa"
    assert sample.token_ids == (a, a, a)
    assert len(sample.logprobs) == 3
    assert sample.finish_reason == "length"


def test_rule_10_stops_begin_behind_the_border() -> None:
    abc, (a,) = TOKENIZER.encode_text("abc")[0], TOKENIZER.encode_text("a")
    stop = SamplingParams(max_tokens=3, stop=("ab", "c"), logit_bias=((abc, 100.0),))
    collector = run(Text(("xya",)), Gen("x", stop, heal=True), Text(("!",)))
    (sample,) = collector.results[1].samples
    assert (sample.text, sample.matched_stop) == ("b", "c"), "'ab' is no part of the value"
    assert (sample.num_kept, sample.residue, sample.num_replaced) == (0, "b", 0)
    ids = SamplingParams(max_tokens=2, stop_token_ids=(a,), logit_bias=((a, 100.0),))
    (sample,) = run(Text(("xya",)), Gen("x", ids, heal=True)).results[1].samples
    assert (sample.text, sample.matched_stop, sample.token_ids) == ("", a, (a, a))


@pytest.mark.parametrize(
    "ops",
    [
        (RoleStart("user"), Text(("a",)), RoleEnd("user"), RoleStart("assistant")),
        (),
        (Text(("a",)), Gen("g", SamplingParams(max_tokens=2, ignore_eos=True))),
    ],
    ids=["after a template", "after nothing", "after generated ids"],
)
def test_rule_10_template_text_and_generated_ids_are_never_backed_off(ops: tuple[Op, ...]) -> None:
    sampling = SamplingParams(max_tokens=4)
    plain = run(*ops, Gen("x", sampling)).results[len(ops)]
    healed = run(*ops, Gen("x", sampling, heal=True)).results[len(ops)]
    assert healed.samples == plain.samples


def test_rule_10_a_literal_in_a_turn_is_healed_up_to_the_template_s_text() -> None:
    ops = (RoleStart("assistant"), Text(("a",)))
    (sample,) = run(*ops, Gen("x", SamplingParams(max_tokens=3), heal=True)).results[2].samples
    assert sample.num_replaced == 1
    assert TOKENIZER.decode(sample.token_ids).startswith("a")


def test_rule_10_samples_heal_each_for_itself_and_one_is_picked() -> None:
    sampling = SamplingParams(max_tokens=3, temperature=1.5)
    after = Gen("y", SamplingParams(max_tokens=3))
    ops = (Text(("xyxa",)), Gen("x", sampling, n=4, heal=True), Pick(2), Text(("c",)), after)
    collector = run(*ops)
    samples = collector.results[1].samples
    assert len({sample.token_ids for sample in samples}) > 1
    for sample in samples:
        assert TOKENIZER.decode(sample.token_ids).startswith("a" + sample.text)
    row = row_after(TOKENIZER.encode_text("xyxa"), samples[2], "c", "xyxa")
    (then,) = collector.results[4].samples
    assert list(then.token_ids) == by_definition(row, b"", after)


def test_rule_10_a_row_that_ends_before_the_literal_is_written_again_is_left_as_it_was() -> None:
    sampling = SamplingParams(max_tokens=9, logit_bias=((ord("0"), 100.0),))
    prompt = "01" * 30  # no merges: each byte a token, and no longer one begins with "1"
    assert backed_off(TOKENIZER.encode_text(prompt), prompt)[1] == b""
    engine = make_engine(max_seq_len=4)
    bias = SamplingParams(max_tokens=9, logit_bias=((ord("a"), 100.0),))
    _, collector = open_run(engine, chain(Text(("xab",)), Gen("x", bias, heal=True)))
    drive(engine)
    (sample,) = collector.results[1].samples
    assert TOKENIZER.decode(sample.token_ids) == "ab"[: len(sample.token_ids)] + sample.text
    assert sample.finish_reason == "length"
    assert run(Text((prompt,)), Gen("x", sampling, heal=True)).results[1].text == "0" * 9


@settings(max_examples=40, deadline=None)
@given(PROMPTS, PROMPTS, st.sampled_from([(), ("a",), ("b", "ab")]), st.booleans())
def test_rule_10_healing_stops_at_the_last_generated_id(
    prompt: str, literal: str, stop: tuple[str, ...], heals_first: bool
) -> None:
    """The literal may begin with what a stop left of a token: that is literal, too."""
    first = Gen("g", SamplingParams(max_tokens=4, stop=stop), heal=heals_first)
    second = Gen("x", SamplingParams(max_tokens=3), heal=True)
    collector = run(Text((prompt,)), first, Text((literal,)), second)
    (before,) = collector.results[1].samples
    row = row_after(TOKENIZER.encode_text(prompt), before, literal, prompt)
    run_text = before.residue + literal if before.num_kept else prompt + before.residue + literal
    own = TOKENIZER.encode_text(run_text)
    assert row[len(row) - len(own) :] == own
    count = PREFIXES.num_to_back_off(own, run_text.encode())
    removed = b"".join(TOKENS[i] for i in own[len(own) - count :])
    start = row[: len(row) - count] or [EOS]
    (sample,) = collector.results[3].samples
    assert list(sample.token_ids) == by_definition(start, removed, second)
    frozen = row[: len(row) - len(own)]
    assert start[: len(frozen)] == frozen


def test_healed_and_plain_gens_share_their_prompt() -> None:
    text = Text(("0123456789" * 3 + "xya",))
    engine = make_engine()
    for heal in (False, True):
        _, collector = open_run(
            engine, chain(text, Gen("x", SamplingParams(max_tokens=2), heal=heal))
        )
        drive(engine)
    usage = collector.results[1].usage
    assert usage.prompt_tokens == 31
    assert usage.cached_tokens == 30  # all but the last, whose logits are wanted
    check_idle(engine)


@pytest.mark.parametrize("jump_forward", [True, False])
def test_rule_14_forced_text_begins_behind_the_border(jump_forward: bool) -> None:
    schema = JsonSchema(
        '{"type": "object", "properties": {"abc": {"type": "integer"}}, '
        '"required": ["abc"], "additionalProperties": false}'
    )
    gen = Gen("x", SamplingParams(max_tokens=40), schema, heal=True)
    (sample,) = run(Text(("xya",)), gen, jump_forward=jump_forward).results[1].samples
    assert sample.accepting or sample.finish_reason == "length"
    assert sample.text.startswith("{")
    assert TOKENIZER.decode(sample.token_ids).startswith("a{")


def test_a_healed_gen_that_ended_elsewhere_is_taken_as_it_was() -> None:
    """A client that resumes sends results: the row must come out of them alone."""
    ops = (Text(("xyxa",)), Gen("x", SamplingParams(max_tokens=3), heal=True), Text(("c",)))
    whole = run(*ops, Gen("y", SamplingParams(max_tokens=4)))
    engine = make_engine()
    resolved: dict[int, NodeResult] = {i: whole.results[i] for i in range(2)}
    collector = Collector()
    session = engine.open(RunOptions(seed=5), collector, resolved)
    session.extend(chain(*ops, Gen("y", SamplingParams(max_tokens=4))))
    session.close()
    drive(engine)
    assert collector.results[3].samples == whole.results[3].samples


@settings(max_examples=25, deadline=None)
@given(
    st.lists(PROMPTS, min_size=1, max_size=4),
    st.sampled_from([None, Regex("[ab]{2,5}"), Regex("[a-c ]{0,4}")]),
    st.sampled_from([0.0, 1.0]),
)
def test_rule_16_healed_ids_depend_on_neither_batch_nor_cache_nor_pieces(
    prompts: list[str], constraint: Constraint | None, temperature: float
) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=temperature, min_tokens=1)
    gen = Gen("x", sampling, constraint, heal=True)
    rows = [chain(Text((p,)), gen, Text((" a",)), gen) for p in prompts]
    expected = [c.outcome() for c in run_graphs(make_engine(), rows)]
    for options in ({"prefix_cache": False}, {"max_step_tokens": 3}, {"max_running": 1}):
        engine = make_engine(**options)
        assert [c.outcome() for c in run_graphs(engine, rows)] == expected
        check_idle(engine)
    tight = make_engine(make_runner(num_slots=16))  # requests are retracted and come back
    assert [c.outcome() for c in run_graphs(tight, rows)] == expected
    alone = run_graphs(make_engine(), rows, alone=True, pieces=True)
    assert [c.outcome() for c in alone] == expected


def test_a_healed_prompt_is_scored_without_what_is_sampled_again() -> None:
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=True)
    prompt = TOKENIZER.encode_text("xyxa")
    for heal, scored in ((False, prompt[1:]), (True, prompt[1:-1])):
        (sample,) = run(Text(("xyxa",)), Gen("x", sampling, heal=heal)).results[1].samples
        assert [entry.token_id for entry in sample.prompt_logprobs] == scored
