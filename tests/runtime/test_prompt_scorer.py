"""Log-probabilities of prompts: what they are, what is computed for them, what is left behind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
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
)
from tests.support.graphs import GraphBuilder, chain
from tests.support.hash_runner import HashRunner

from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Branch, Gen, Join, Select, Text
from umbel.lang.results import TokenLogprob
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine
from umbel.runtime.model_runner.runner import MAX_SCORED_ROWS
from umbel.runtime.scheduler.policy import POLICIES

SCORED = SamplingParams(max_tokens=1, prompt_logprobs=True)
PLAIN = SamplingParams(max_tokens=1)
# no merge crosses a digit, so a text is the tokens of its parts, one for each digit
SHARED = "0123456789" * 6


def ask(text: str, sampling: SamplingParams = SCORED, n: int = 1) -> RequestGraph:
    return chain(Text((text,)), Gen("x", sampling, n=n))


def run(engine: Engine, *graphs: RequestGraph) -> list[Collector]:
    collectors = [open_run(engine, graph)[1] for graph in graphs]
    drive(engine)
    for graph, collector in zip(graphs, collectors, strict=True):
        assert collector.num_ended == len(graph.nodes)
        assert not collector.errors
    check_idle(engine)
    return collectors


def scores(collector: Collector, node: int = 1) -> tuple[TokenLogprob, ...]:
    return collector.results[node].samples[0].prompt_logprobs


def expected(runner: HashRunner, ids: Sequence[int], num_top: int = 0) -> list[TokenLogprob]:
    """Score a prompt token by token, by the definition."""
    found = []
    for i in range(1, len(ids)):
        logits = runner.logits_of(ids[:i]).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.argsort(-logits, kind="stable")[:num_top].tolist()
        top = tuple((j, float(logprobs[j])) for j in best)
        text, *top_texts = (TOKENIZER.decode((j,)) for j in (ids[i], *best))
        found.append(TokenLogprob(ids[i], float(logprobs[ids[i]]), top, text, tuple(top_texts)))
    return found


def assert_close(found: Sequence[TokenLogprob], wanted: Sequence[TokenLogprob]) -> None:
    assert [t.token_id for t in found] == [t.token_id for t in wanted]
    for one, two in zip(found, wanted, strict=True):
        assert (one.text, one.top_texts) == (two.text, two.top_texts)
        assert one.logprob == pytest.approx(two.logprob, abs=2e-6)
        assert [i for i, _ in one.top] == [i for i, _ in two.top]
        assert [x for _, x in one.top] == pytest.approx([x for _, x in two.top], abs=2e-6)


@given(st.text("abcxy 019", min_size=1, max_size=80), st.sampled_from([0, 1, 5]))
def test_every_token_after_the_first_is_scored_given_those_before(text: str, num_top: int) -> None:
    runner = make_runner()
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=True, top_logprobs=num_top)
    (found,) = run(make_engine(runner), ask(text, sampling))
    assert_close(scores(found), expected(runner, TOKENIZER.encode_text(text), num_top))


def test_a_prompt_of_one_token_has_no_scores() -> None:
    (found,) = run(make_engine(), ask("0"))
    assert scores(found) == ()


def test_who_does_not_ask_gets_none_and_pays_for_none() -> None:
    runner = make_runner()
    (found,) = run(make_engine(runner), ask(SHARED, PLAIN))
    assert scores(found) == ()
    assert runner.num_logits == 1


# --- what is computed -----------------------------------------------------------------------


def test_a_prompt_that_was_scored_is_not_computed_again() -> None:
    runner = make_runner()
    engine = make_engine(runner)
    (first,) = run(engine, ask(SHARED))
    before = runner.num_tokens
    (second,) = run(engine, ask(SHARED))
    assert runner.num_tokens == before + 1, "the last row, which is sampled from"
    assert scores(second) == scores(first)


@pytest.mark.parametrize("budget", [7, 64])
def test_a_prompt_that_leaves_a_scored_one_computes_one_row_more(budget: int) -> None:
    runner = make_runner()
    engine = make_engine(runner, max_step_tokens=budget)
    run(engine, ask(SHARED))
    before = runner.num_tokens
    (found,) = run(engine, ask(SHARED + "xyxy"))  # two tokens more
    assert runner.num_tokens == before + 2 + 1
    assert_close(scores(found), expected(runner, TOKENIZER.encode_text(SHARED + "xyxy")))


def test_what_was_cached_without_scores_is_computed_once_for_all_who_ask() -> None:
    runner = make_runner()
    engine = make_engine(runner)
    run(engine, ask(SHARED, PLAIN))
    before = runner.num_tokens
    prompts = [SHARED + digit * 2 for digit in "0123456"]
    found = run(engine, *map(ask, prompts))
    assert runner.num_tokens == before + len(SHARED) + 2 * len(prompts)
    for prompt, collector in zip(prompts, found, strict=True):
        assert_close(scores(collector), expected(runner, TOKENIZER.encode_text(prompt)))
    before = runner.num_tokens
    again = run(engine, *map(ask, prompts))
    assert runner.num_tokens == before + len(prompts), "and then it is known"
    assert [*map(scores, again)] == [*map(scores, found)]


def test_siblings_of_one_step_score_each_other_s_rows() -> None:
    runner = make_runner()
    engine = make_engine(runner, max_step_tokens=512)
    prompts = [SHARED + digit * 2 for digit in "0123456"]
    run(engine, *map(ask, prompts))
    assert runner.num_tokens == len(SHARED) + 2 * len(prompts)


def test_rows_are_scored_that_a_plain_sibling_computes_in_the_same_step() -> None:
    runner = make_runner()
    engine = make_engine(runner, max_step_tokens=512)
    _, found = run(engine, ask(SHARED, PLAIN), ask(SHARED + "00"))
    assert runner.num_tokens == len(SHARED) + 2
    assert_close(scores(found), expected(runner, TOKENIZER.encode_text(SHARED + "00")))


def test_alternatives_are_computed_where_they_were_not_asked_for_and_then_kept() -> None:
    runner = make_runner()
    engine = make_engine(runner)
    run(engine, ask(SHARED))
    again = len(SHARED) - 1
    for num_top, num_more in [(0, 0), (3, again), (3, 0), (2, 0), (4, again), (0, 0)]:
        before = runner.num_tokens
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=True, top_logprobs=num_top)
        (found,) = run(engine, ask(SHARED, sampling))
        assert runner.num_tokens == before + 1 + num_more
        assert_close(scores(found), expected(runner, TOKENIZER.encode_text(SHARED), num_top))


def test_samples_share_one_scoring_which_the_first_one_carries() -> None:
    runner = make_runner()
    for options in ({}, {"prefix_cache": False}):
        before = runner.num_logits
        engine = make_engine(runner, **options)
        (found,) = run(engine, ask(SHARED, SamplingParams(max_tokens=1, prompt_logprobs=True), 3))
        first, *others = found.results[1].samples
        assert_close(first.prompt_logprobs, expected(runner, TOKENIZER.encode_text(SHARED)))
        assert [sample.prompt_logprobs for sample in others] == [(), ()]
        assert runner.num_logits == before + len(SHARED) - 1 + 3


def test_generated_tokens_are_part_of_the_next_prompt() -> None:
    runner = make_runner()
    long = SamplingParams(max_tokens=9, prompt_logprobs=True, ignore_eos=True)
    (found,) = run(make_engine(runner), chain(Text((SHARED,)), Gen("x", long), Gen("y", long)))
    sample = found.results[1].samples[0]
    ids = [*TOKENIZER.encode_text(SHARED), *sample.token_ids[: sample.num_kept]]
    assert_close(scores(found, 2), expected(runner, ids))


def test_a_healed_prompt_is_scored_as_it_is_computed() -> None:
    runner = make_runner()
    (found,) = run(make_engine(runner), chain(Text(("01xyab",)), Gen("x", SCORED, heal=True)))
    ids = TOKENIZER.encode_text("01xyab")
    kept = ids[: 1 + len(scores(found))]
    assert len(kept) < len(ids), "the end of the text is sampled again"
    assert_close(scores(found), expected(runner, kept))


def test_no_tensor_holds_the_logits_of_a_whole_prompt_or_select() -> None:
    runner = make_runner()
    engine = make_engine(runner, max_step_tokens=512)
    choices = tuple(digit * 20 for digit in "0123456789")
    run(engine, ask("0123456789" * 50), chain(Text(("a",)), Select("s", choices)))
    assert runner.num_tokens > 600
    assert runner.most_logits == MAX_SCORED_ROWS


# --- equalities -----------------------------------------------------------------------------

TEXTS = st.sampled_from([SHARED, SHARED[:17], "abcabc", "xyxyab0", "0", SHARED[:30] + "abc"])


@st.composite
def programs(draw: st.DrawFn) -> RequestGraph:
    """Forks whose branches and trunk are scored or not, with and without alternatives."""
    builder = GraphBuilder()

    def gen(at: int | None) -> int:
        is_scored = draw(st.booleans())
        sampling = SamplingParams(
            max_tokens=draw(st.integers(1, 4)),
            prompt_logprobs=is_scored,
            top_logprobs=draw(st.sampled_from([0, 2, 4])) if is_scored else 0,
            ignore_eos=True,
        )
        return builder.add(Gen(f"g{at}", sampling, n=1), at)

    at: int | None = builder.add(Text((draw(TEXTS),)), None)
    if draw(st.booleans()):
        at = gen(at)
    width = draw(st.integers(1, 4))
    heads = [builder.add(Branch(i, width, "f"), at) for i in range(width)]
    ends = []
    for head in heads:
        end = gen(builder.add(Text((draw(TEXTS),)), head))
        if draw(st.booleans()):
            end = gen(builder.add(Text((draw(TEXTS),)), end))
        ends.append(end)
    builder.add(Join(tuple(ends), "all", "gather"), at)
    return builder.piece()


@settings(max_examples=120)
@given(
    st.lists(programs(), min_size=1, max_size=4),
    st.integers(1, 40),
    st.integers(250, 400),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([1, 16]),
)
def test_neither_cache_nor_chunks_nor_retraction_nor_policy_change_a_score(
    graphs: list[RequestGraph], budget: int, num_slots: int, policy: str, page_size: int
) -> None:
    cold = make_engine(prefix_cache=False)
    wanted = [collector.outcome() for graph in graphs for collector in run(cold, graph)]
    warm = make_engine(
        make_runner(num_slots),
        max_seq_len=240,
        max_step_tokens=budget,
        policy=policy,
        page_size=page_size,
    )
    for _ in range(2):  # the second time what the first one left is there
        assert [collector.outcome() for collector in run(warm, *graphs)] == wanted


# --- what goes wrong ------------------------------------------------------------------------


def poisoned_engine(is_poisoned: Sequence[int], **options: bool) -> Engine:
    return make_engine(make_runner(poison=lambda prefix: list(prefix) == is_poisoned), **options)


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_row_that_is_no_distribution_fails_who_asked_for_it_alone(is_cached: bool) -> None:
    engine = poisoned_engine(TOKENIZER.encode_text(SHARED[:20]))
    if is_cached:
        run(engine, ask(SHARED, PLAIN))
    _, ill = open_run(engine, ask(SHARED))
    _, well = open_run(engine, ask(SHARED, PLAIN))
    drive(engine)
    assert ill.errors == {1: "EngineError"}
    assert list(well.results) == [0, 1]
    check_idle(engine)


def test_a_recomputation_whose_pass_raises_fails_those_who_wait_for_it() -> None:
    is_broken = False

    def poison(prefix: Sequence[int]) -> bool:
        if is_broken:
            raise ZeroDivisionError("the device fell off")
        return False

    engine = make_engine(make_runner(poison=poison), max_step_tokens=16)
    run(engine, ask(SHARED, PLAIN))
    seen = [open_run(engine, ask(SHARED + digit))[1] for digit in "01"]
    engine.step()
    is_broken = True
    engine.step()
    is_broken = False
    drive(engine)
    assert [collector.errors for collector in seen] == [{1: "EngineError"}] * 2
    check_idle(engine)
    run(engine, ask(SHARED + "0"))


@given(st.integers(0, 12), st.lists(st.booleans(), min_size=3, max_size=3))
def test_a_cancelled_gen_leaves_the_scores_of_others_alone(
    num_steps: int, cancelled: list[bool]
) -> None:
    engine = make_engine(max_step_tokens=16)
    run(engine, ask(SHARED, PLAIN))
    wanted = scores(run(make_engine(), ask(SHARED + "0"))[0])
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=True, ignore_eos=True)
    runs = [open_run(engine, ask(SHARED + "0", sampling)) for _ in cancelled]
    for _ in range(num_steps):
        engine.step()
    for (session, _), is_cancelled in zip(runs, cancelled, strict=True):
        if is_cancelled:
            session.cancel()
    drive(engine)
    engine.step()  # what nobody waits for any more goes with the next step
    for (_, collector), is_cancelled in zip(runs, cancelled, strict=True):
        assert collector.num_ended == 2
        assert is_cancelled or scores(collector) == wanted
    check_idle(engine)


def test_closing_the_engine_fails_a_gen_that_waits_for_its_scores() -> None:
    engine = make_engine(max_step_tokens=16)
    run(engine, ask(SHARED, PLAIN))
    _, collector = open_run(engine, ask(SHARED))
    engine.step()
    engine.close()
    assert collector.errors == {1: "EngineStoppedError"}
    check_idle(engine)


def test_text_does_not_wait_for_the_scores() -> None:
    engine = make_engine(max_step_tokens=4)
    run(engine, ask(SHARED, PLAIN))
    sampling = SamplingParams(max_tokens=8, prompt_logprobs=True, ignore_eos=True)
    _, collector = open_run(engine, ask(SHARED, sampling))
    for _ in range(8):
        engine.step()
    text = collector.deltas[1]
    assert 1 not in collector.results
    drive(engine)
    assert collector.results[1].text == text
    assert len(scores(collector)) == len(SHARED) - 1
