"""Think blocks: what a template says of them, where they end, and that the value begins behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import Collector, check_idle, drive, open_run, run_graphs
from tests.support.graphs import chain
from tests.support.hash_runner import HashRunner

import umbel as ub
from umbel.interpreter.backends.local import LocalBackend
from umbel.interpreter.backends.remote import RemoteBackend
from umbel.lang.constraints import Constraint, JsonSchema, Regex
from umbel.lang.errors import UnsupportedFeatureError
from umbel.lang.ir import Gen, Op, Pick, RoleEnd, RoleStart, Text
from umbel.lang.results import NodeResult, RunOptions, Sample
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.chat_template import ChatTemplate
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.grammar import GrammarCompiler
from umbel.runtime.server import BackgroundServer, create_app
from umbel.runtime.tokenizer import Tokenizer

TURNS = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {{- message.content.split('</think>')[-1].lstrip('\\n') }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
"""
SWITCHED = TURNS + (  # as Qwen3's does
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
EITHER = TURNS + (  # as Qwen3.5's does
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)
ALWAYS = TURNS + "{{- '<think>\\n' }}{%- endif %}"  # as DeepSeek-R1's does
NAMED = TURNS + (  # as DeepSeek-V3.1's does
    "{{- '<think>' if thinking is defined and thinking else '</think>' }}{%- endif %}"
)
NEVER = TURNS + "{{- '<think></think>' }}{%- endif %}"
PLAIN = TURNS.replace("message.content.split('</think>')[-1].lstrip('\\n')", "message.content") + (
    "{%- endif %}"
)
EARLY = "{{- '/think' if enable_thinking else '/no_think' }}" + SWITCHED
TURN = "<|im_start|>assistant\n"


def merges_of(*words: str) -> list[tuple[str, str]]:
    """Merges that make each word one token."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
    return list(merges)


MERGES = merges_of("<think>", "</think>", "ab", "abc")
TOKENIZER = Tokenizer.byte_level(320, MERGES, template=SWITCHED)
(CLOSE,) = TOKENIZER.encode_text("</think>")
ENDING = [CLOSE, *TOKENIZER.encode_text("\n\n")]
_GRAMMAR = GrammarCompiler(TOKENIZER.vocabulary())


@pytest.fixture(scope="module", autouse=True)
def _close_grammar() -> Iterator[None]:
    yield
    _GRAMMAR.close()


def runner(num_slots: int = 768) -> HashRunner:
    size = TOKENIZER.vocabulary().size
    return HashRunner(num_slots, size, eos_id=min(TOKENIZER.eos_ids), eos_boost=2.0)


def make(
    tokenizer: Tokenizer = TOKENIZER,
    start: bool = False,
    model: HashRunner | None = None,
    **options: Any,
) -> Engine:
    fields: dict[str, Any] = {"check_accounting": True, "max_running": 8, "max_step_tokens": 64}
    config = EngineConfig(**(fields | options))
    return Engine(
        model or runner(),
        tokenizer,
        config,
        max_seq_len=config.max_seq_len or 512,
        grammar=_GRAMMAR if tokenizer is TOKENIZER else None,
        start=start,
    )


def turn(text: str, *ops: Op) -> tuple[Op, ...]:
    return (RoleStart("user"), Text((text,)), RoleEnd("user"), RoleStart("assistant"), *ops)


def run(*ops: Op, engine: Engine | None = None) -> Collector:
    engine = engine or make()
    _, collector = open_run(engine, chain(*ops), seed=5)
    drive(engine)
    check_idle(engine)
    return collector


def prompt_of(text: str, opened: str = "<think>") -> list[int]:
    special = {name: TOKENIZER.special_id(name) for name in ("<|im_start|>", "<|im_end|>")}
    start, end = special["<|im_start|>"], special["<|im_end|>"]
    assert start is not None
    assert end is not None
    asked = [start, *TOKENIZER.encode_text(f"user\n{text}"), end]
    return [
        *asked,
        *TOKENIZER.encode_text("\n"),
        start,
        *TOKENIZER.encode_text(f"assistant\n{opened}"),
    ]


def by_definition(prompt: list[int], gen: Gen) -> list[int]:
    """Sample greedily, one id at a time, from what the definition of a think block allows."""
    model = runner()
    bias = dict(gen.sampling.logit_bias)

    def best(ids: list[int], allowed: set[int] | None, forbidden: set[int]) -> int:
        logits = model.logits_of([*prompt, *ids])
        for token_id, value in bias.items():
            logits[token_id] += np.float32(value)
        logits[list(forbidden)] = -np.inf
        if allowed is not None:
            logits[[i for i in range(len(logits)) if i not in allowed]] = -np.inf
        return int(logits.argmax())

    eos = set(TOKENIZER.eos_ids)
    ids: list[int] = []
    if gen.thinking:
        while True:
            is_full = len(ids) + len(ENDING) >= gen.max_thinking_tokens
            ids.append(best(ids, {CLOSE} if is_full else None, eos))
            if ids[-1] == CLOSE:
                break
        ids += ENDING[1:]
    for index in range(gen.sampling.max_tokens):
        ids.append(best(ids, None, eos if index < gen.sampling.min_tokens else set()))
        if ids[-1] in eos:
            break
    return ids


@pytest.mark.parametrize(
    ("source", "off", "start", "after"),
    [
        (SWITCHED, "<think>\n\n</think>\n\n", "<think>", "\n\n"),
        (EITHER, "<think>\n\n</think>\n\n", "<think>\n", "\n\n"),
        (ALWAYS, "<think>\n\n</think>\n\n", "<think>\n", "\n\n"),
        (NAMED, "</think>", "<think>", ""),
    ],
    ids=["switched", "either", "always", "named otherwise"],
)
def test_rule_10b_a_turn_is_opened_with_or_without_a_block(
    source: str, off: str, start: str, after: str
) -> None:
    template = ChatTemplate(source)
    for history in (("user",), ("user", "assistant", "user")):
        assert template.start(history, "assistant").endswith(TURN + off)
        form = template.thinking(history)
        assert form.start.endswith(TURN + start)
        assert (form.close, form.after) == ("</think>", after)
        with_block = form.start.removesuffix(start)
        assert template.start(history, "assistant") == with_block + off


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (PLAIN, "mentions no block"),
        (NEVER, "ends the block at once"),
        (EARLY, "in an earlier turn"),
    ],
)
def test_rule_10b_a_template_that_can_not_think_refuses_it(source: str, why: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=why):
        ChatTemplate(source).thinking(("user",))
    engine = make(Tokenizer.byte_level(320, MERGES, template=source))
    collector = run(*turn("Hi", Gen("x", thinking=True)), engine=engine)
    assert collector.errors == {4: "UnsupportedFeatureError"}
    engine.close()


def test_rule_10b_a_mark_that_is_no_token_is_refused() -> None:
    engine = make(Tokenizer.byte_level(320, template=SWITCHED))
    collector = run(*turn("Hi", Gen("x", thinking=True)), engine=engine)
    assert collector.errors == {4: "UnsupportedFeatureError"}
    engine.close()


@pytest.mark.parametrize(
    "ops",
    [
        (Gen("x", thinking=True),),
        (RoleStart("user"), Gen("x", thinking=True)),
        turn("Hi", Text(("Well, ",)), Gen("x", thinking=True)),
        turn(
            "Hi", Gen("a", SamplingParams(max_tokens=2, ignore_eos=True)), Gen("x", thinking=True)
        ),
        turn("Hi", Gen("x", thinking=True, max_thinking_tokens=len(ENDING) - 1)),
    ],
    ids=["outside", "of a user", "after text", "after a gen", "no room for its end"],
)
def test_rule_10b_a_block_comes_first_in_an_assistant_s_turn(ops: tuple[Op, ...]) -> None:
    assert run(*ops).errors == {len(ops) - 1: "ProgramError"}


@settings(max_examples=60, deadline=None)
@given(
    st.integers(len(ENDING), 12),
    st.integers(1, 5),
    st.integers(0, 1),
    st.sampled_from([0.0, 3.0, 50.0]),
    st.sampled_from([(), ("a", "\n"), ("e", "t")]),
)
def test_rule_10b_a_gen_that_thinks_is_what_its_definition_says(
    most: int, max_tokens: int, min_tokens: int, bias: float, stop: tuple[str, ...]
) -> None:
    sampling = SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens, stop=stop, logit_bias=((CLOSE, bias),)
    )
    gen = Gen("x", sampling, thinking=True, max_thinking_tokens=most)
    after = Gen("y", SamplingParams(max_tokens=3))
    collector = run(*turn("Hi", gen, Text(("bc",)), after))
    assert collector.errors == {}
    (sample,) = collector.results[4].samples
    expected = by_definition(prompt_of("Hi"), gen)
    assert list(sample.token_ids) == expected[: len(sample.token_ids)]
    if not isinstance(sample.matched_stop, str):
        assert list(sample.token_ids) == expected
    block = sample.thinking
    assert block is not None
    ids = list(sample.token_ids[: block.num_tokens])
    assert ids[-len(ENDING) :] == ENDING
    assert CLOSE not in ids[: -len(ENDING)]
    assert block.text == TOKENIZER.decode(ids[: -len(ENDING)])
    assert block.num_tokens <= most
    assert block.finish_reason == ("length" if block.num_tokens == most else "stop")
    assert collector.deltas.get(4, "") == sample.text, "the block is not streamed"
    assert not any(text in sample.text for text in stop), "but may be in the block"
    value_ids = sample.token_ids[block.num_tokens :]
    assert TOKENIZER.decode(value_ids).startswith(sample.text.rstrip("\ufffd"))
    assert len(value_ids) <= max_tokens
    assert collector.results[4].usage.completion_tokens == len(sample.token_ids)
    # the row goes on with the block in it
    row = [*prompt_of("Hi"), *sample.token_ids[: sample.num_kept]]
    row += TOKENIZER.encode_text(sample.residue + "bc")
    assert list(collector.results[6].samples[0].token_ids) == by_definition(row, after)


def test_rule_10b_tokens_that_would_end_a_value_may_be_thought() -> None:
    """The mark, what follows it, and stop tokens of the program's own are no ends before it."""
    (newline,) = TOKENIZER.encode_text("\n")
    sampling = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(newline, CLOSE))
    gen = Gen("x", sampling, thinking=True, max_thinking_tokens=5)
    collector = run(*turn("Hi", gen))
    (sample,) = collector.results[4].samples
    assert sample.thinking is not None
    assert list(sample.token_ids[: sample.thinking.num_tokens][-len(ENDING) :]) == ENDING
    assert len(sample.token_ids) - sample.thinking.num_tokens >= 2
    (a,) = TOKENIZER.encode_text("a")
    stop = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(a,))
    healed = run(Text(("xa",)), Gen("x", stop, Regex("[bc]{2,4}"), heal=True))
    assert healed.errors == {}


@pytest.mark.parametrize("jump_forward", [True, False])
@pytest.mark.parametrize(
    "constraint",
    [
        Regex("[ab]{2,5}"),
        JsonSchema(
            '{"type": "object", "properties": {"abc": {"type": "boolean"}}, '
            '"required": ["abc"], "additionalProperties": false}'
        ),
    ],
    ids=["regex", "schema"],
)
def test_rule_10b_a_constraint_begins_behind_the_block(
    constraint: Constraint, jump_forward: bool
) -> None:
    sampling = SamplingParams(max_tokens=40)
    gen = Gen("x", sampling, constraint, thinking=True, max_thinking_tokens=9)
    (sample,) = run(*turn("Hi", gen), engine=make(jump_forward=jump_forward)).results[4].samples
    assert sample.accepting
    assert sample.thinking is not None
    assert sample.thinking.num_tokens > len(ENDING)
    plain = run(*turn("Hi", gen), engine=make(jump_forward=not jump_forward)).results[4].samples
    assert plain == (sample,)


def test_rule_10b_a_context_that_is_too_short_for_the_block_leaves_room_for_the_value() -> None:
    prompt = prompt_of("Hi")
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    gen = Gen("x", sampling, thinking=True, max_thinking_tokens=500)
    (sample,) = run(*turn("Hi", gen), engine=make(max_seq_len=len(prompt) + 12)).results[4].samples
    assert sample.thinking is not None
    assert sample.thinking.num_tokens <= 8
    assert len(sample.token_ids) - sample.thinking.num_tokens == 4
    # no room even for the end of the block: it ends with the row, and nothing is kept
    (sample,) = run(*turn("Hi", gen), engine=make(max_seq_len=len(prompt) + 2)).results[4].samples
    assert (sample.text, sample.finish_reason, sample.num_kept) == ("", "length", 0)


def test_rule_10b_samples_think_each_for_itself_and_one_is_picked() -> None:
    sampling = SamplingParams(max_tokens=3, temperature=1.5, logprobs=True)
    gen = Gen("x", sampling, n=3, thinking=True, max_thinking_tokens=8)
    after = Gen("y", SamplingParams(max_tokens=3))
    collector = run(*turn("Hi", gen, Pick(1), Text(("c",)), after))
    samples: tuple[Sample, ...] = collector.results[4].samples
    assert len({sample.thinking.text for sample in samples if sample.thinking}) == 3
    for sample in samples:
        assert tuple(entry.token_id for entry in sample.logprobs) == sample.token_ids
    row = [*prompt_of("Hi"), *samples[1].token_ids[: samples[1].num_kept]]
    row += TOKENIZER.encode_text(samples[1].residue + "c")
    assert list(collector.results[7].samples[0].token_ids) == by_definition(row, after)


def test_a_gen_that_thought_elsewhere_is_taken_as_it_was() -> None:
    gen = Gen("x", SamplingParams(max_tokens=3), thinking=True, max_thinking_tokens=8)
    ops = turn("Hi", gen, Text(("c",)), Gen("y", SamplingParams(max_tokens=4)))
    whole = run(*ops)
    engine, collector = make(), Collector()
    resolved: dict[int, NodeResult] = {i: whole.results[i] for i in range(5)}
    session = engine.open(RunOptions(seed=5), collector, resolved)
    session.extend(chain(*ops))
    session.close()
    drive(engine)
    assert collector.results[6].samples == whole.results[6].samples


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(["Hi", "Why?", "Hi there", ""]), min_size=1, max_size=4),
    st.sampled_from([None, Regex("[ab]{2,5}")]),
    st.sampled_from([0.0, 1.0]),
)
def test_rule_16_thoughts_depend_on_neither_batch_nor_cache_nor_pieces(
    texts: list[str], constraint: Constraint | None, temperature: float
) -> None:
    sampling = SamplingParams(
        max_tokens=4, temperature=temperature, min_tokens=1, logit_bias=((CLOSE, 4.0),)
    )
    gen = Gen("x", sampling, constraint, thinking=True, max_thinking_tokens=9)
    rows = [
        chain(*turn(text, gen, RoleEnd("assistant"), *turn(text, gen, Text((" a",)))))
        for text in texts
    ]
    expected = [c.outcome() for c in run_graphs(make(), rows)]
    for options in ({"prefix_cache": False}, {"max_step_tokens": 3}, {"max_running": 1}):
        engine = make(**options)
        assert [c.outcome() for c in run_graphs(engine, rows)] == expected
        check_idle(engine)
    tight = make(model=runner(num_slots=112))  # requests are retracted and come back
    assert [c.outcome() for c in run_graphs(tight, rows)] == expected
    alone = run_graphs(make(), rows, alone=True, pieces=True)
    assert [c.outcome() for c in alone] == expected


@ub.function
def asked(s: ub.State) -> str:
    s += ub.user("Hi")
    s += ub.assistant(ub.gen("x", thinking=True, max_thinking_tokens=7, max_tokens=5))
    s += ub.user("Why?")
    s += ub.assistant(ub.gen("y", max_tokens=3))
    return str(s["x"])


def test_rule_10b_a_program_sees_the_value_and_finds_the_block_in_the_metadata() -> None:
    with LocalBackend(make(start=True)) as backend:
        result = asked.options(backend=backend).run()
    block = result.meta("x").thinking
    assert block is not None
    assert 3 <= block.num_tokens <= 7
    assert result.meta("y").thinking is None
    assert result.value == result["x"]
    assert result.text() == f"Hi{result['x']}Why?{result['y']}"
    assert [m["content"] for m in result.messages] == ["Hi", result["x"], "Why?", result["y"]]


@ub.function
def on(s: ub.State) -> str:
    s += ub.user("Hi")
    with s.assistant():
        s += ub.gen("x", thinking=True, max_thinking_tokens=7, max_tokens=5)
        first = s["x"]  # what follows is a piece of its own
        s += ", a" + ub.gen("y", heal=True, max_tokens=3)
    return str(first + s["y"])


def test_rule_10_a_server_thinks_and_heals_as_a_local_model_does() -> None:
    with LocalBackend(make(start=True)) as local:
        expected = on.options(backend=local, seed=1).run()
    engine = make(start=True)
    app = create_app(
        engine, model_name="hash", capabilities=msgspec.to_builtins(LocalBackend.capabilities)
    )
    with BackgroundServer(app) as server, RemoteBackend(server.url) as backend:
        assert backend.capabilities.heal
        assert backend.capabilities.thinking
        result = on.options(backend=backend, seed=1).run()
    engine.close()
    assert result.value == expected.value
    for name in ("x", "y"):
        assert result.meta(name).samples == expected.meta(name).samples
    assert result.meta("y").samples[0].num_replaced == 1
