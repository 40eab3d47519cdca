"""Requests that follow their automaton on the device get what the host's masks give them.

The engine is the whole one, on hash logits, with the kernels interpreted where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_harness import (
    GRAMMAR,
    TOKENIZER,
    Collector,
    GraphMaker,
    check_idle,
    drive,
    graphs,
    make_runner,
    open_run,
    run_graphs,
)

from umbel.kernels import sampling_ops
from umbel.lang.constraints import Choices, Grammar, Regex
from umbel.lang.graph import RequestGraph
from umbel.lang.ir import Gen, Text
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.grammar.device_arena import DeviceArena
from umbel.runtime.sampling import SamplingRow
from umbel.runtime.sampling.device_sampler import (
    DeviceSampler,
    IntArray,
    PendingLogprobs,
    PendingTokens,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_RUNNING = 6
VOCABULARY = TOKENIZER.vocabulary()

CONSTRAINTS = (
    None,
    Regex("[ab]{2,5}"),
    Regex("([abc]x)*y?"),
    Regex("(xyxy|0123)[0-9]{1,3}abc"),  # with forced text
    Choices(("yes", "no", "xyz")),
    Grammar('start: "a"+ "b"?'),  # which no automaton follows
)
few = settings(max_examples=8)
programs = st.lists(graphs(max_ops=5, constraints=CONSTRAINTS), min_size=2, max_size=4)


class HashSampler(DeviceSampler):
    """One whose logits are made on the host."""

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        bitmask: torch.Tensor,
        at: Sequence[int] | None = None,
    ) -> PendingTokens:
        return super().sample(logits.to(DEVICE), rows, bitmask, at)

    def logprobs(self, logits: torch.Tensor, token_ids: IntArray, at: IntArray) -> PendingLogprobs:
        return super().logprobs(logits.to(DEVICE), token_ids, at)


def make_engine(
    num_states: int,
    num_slots: int = 768,
    sampler_type: type[DeviceSampler] = HashSampler,
    **options: Any,
) -> Engine:
    """Return an engine that samples on the device, with an arena of so many states, or none."""
    config = EngineConfig(
        check_accounting=True, max_running=MAX_RUNNING, **({"max_step_tokens": 64} | options)
    )
    arena = DeviceArena(VOCABULARY, DEVICE, num_states) if num_states else None
    return Engine(
        make_runner(num_slots=num_slots),
        TOKENIZER,
        config,
        max_seq_len=config.max_seq_len or 512,
        grammar=GRAMMAR,
        sampler=sampler_type(sampling_ops(), VOCABULARY.size, MAX_RUNNING, DEVICE, arena),
        start=False,
    )


def outcomes(collectors: list[Collector]) -> list[dict[int, object]]:
    return [collector.outcome() for collector in collectors]


@pytest.mark.slow
@few
@given(programs, st.booleans(), st.booleans(), st.integers(3, 30), st.integers(150, 300))
def test_no_output_depends_on_who_masks(
    batch: list[RequestGraph], overlap: bool, jump: bool, budget: int, num_slots: int
) -> None:
    """With room for all, for few, and with retractions where pages are short."""
    host = make_engine(0, max_seq_len=149, jump_forward=jump)
    expected = outcomes(run_graphs(host, batch))
    for num_states in (500, 12):
        device = make_engine(
            num_states,
            num_slots,
            max_seq_len=149,
            jump_forward=jump,
            overlap=overlap,
            max_step_tokens=budget,
        )
        assert outcomes(run_graphs(device, batch)) == expected
        check_idle(device)


@pytest.mark.slow
@few
@given(
    programs,
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.booleans()), max_size=5),
    st.booleans(),
)
def test_a_cancel_at_any_moment_gives_the_automaton_back(
    batch: list[RequestGraph], cancels: list[tuple[int, int, bool]], overlap: bool
) -> None:
    engine = make_engine(40, 300, overlap=overlap)
    runs = [open_run(engine, graph, seed=7, row=row) for row, graph in enumerate(batch)]
    for num_steps, row, whole in cancels:
        for _ in range(num_steps):
            engine.step()
        runs[row % len(runs)][0].cancel(None if whole else [row])
    drive(engine)
    check_idle(engine)


def gen_graph(gen: Gen) -> RequestGraph:
    maker = GraphMaker()
    maker.add(gen, maker.add(Text(("abc ",)), None))
    return maker.graph()


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"ignore_eos": True},
    {"min_tokens": 4},
    {"stop": ("b",)},
    {"stop_token_ids": tuple(VOCABULARY.encode("ab"))},
    {"logit_bias": ((VOCABULARY.encode("x")[0], 50.0),)},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"logprobs": True, "top_logprobs": 3},
    {"temperature": 1.2, "seed": 5},
    {"temperature": 1.2, "top_p": 0.7, "seed": 5},
    {"temperature": 0.9, "top_k": 2, "min_p": 0.05, "seed": 5},
)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["([abc]x){1,6}y?", "[a-c]*"])
def test_every_option_works_beside_an_automaton(pattern: str) -> None:
    batch = [
        gen_graph(Gen("g", SamplingParams(max_tokens=9, **options), Regex(pattern), n=2))
        for options in OPTIONS
    ]
    device, host = make_engine(200), make_engine(0)
    found = run_graphs(device, batch)
    assert outcomes(found) == outcomes(run_graphs(host, batch))
    assert not any(collector.errors for collector in found)
    assert device.stats()["grammars_refused"] == 0
    check_idle(device)


def test_rows_go_on_from_where_they_were_when_others_end_or_come() -> None:
    batch = [
        gen_graph(Gen("g", SamplingParams(max_tokens=most), Regex(pattern)))
        for most, pattern in ((2, "[ab]{3,9}"), (9, "(bca?){2,9}"), (3, "[xy]{3,9}"))
    ]
    batch.insert(1, gen_graph(Gen("g", SamplingParams(max_tokens=4, ignore_eos=True))))
    batch *= 2
    engine = make_engine(200)
    found = outcomes(run_graphs(engine, batch))
    assert found == outcomes(run_graphs(make_engine(0), batch))
    assert engine.stats()["grammars_refused"] == 0


def test_a_value_behind_a_healed_prompt_begins_at_its_own_state() -> None:
    batch = [
        gen_graph(Gen("g", SamplingParams(max_tokens=6), Regex("[xy]{3,9}"))),
        gen_graph(Gen("g", SamplingParams(max_tokens=6), Regex(" ?[ab]{3,9}"), heal=True)),
    ]
    engine = make_engine(200)
    found = outcomes(run_graphs(engine, batch))
    assert found == outcomes(run_graphs(make_engine(0), batch))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 3}])
def test_rows_sampled_in_pieces_go_on_from_what_the_host_knows(options: dict[str, Any]) -> None:
    batch = [
        gen_graph(Gen("g", SamplingParams(max_tokens=9, **options), Regex(pattern)))
        for pattern in ("[ab]{3,9}", "(bca?){2,9}", "[xy]{3,9}")
    ]
    engine = make_engine(200, sampler_type=FailingSampler)
    assert outcomes(run_graphs(engine, batch)) == outcomes(run_graphs(make_engine(0), batch))
    check_idle(engine)


class FailingSampler(HashSampler):
    """One whose every third batch fails, when its states have been stepped."""

    num_batches = 0

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        bitmask: torch.Tensor,
        at: Sequence[int] | None = None,
    ) -> PendingTokens:
        pending = super().sample(logits, rows, bitmask, at)
        self.num_batches += len(rows) > 1
        if len(rows) > 1 and self.num_batches % 3 == 0:
            raise RuntimeError("a batch that can't be sampled")
        return pending


def test_a_value_is_masked_on_the_device_from_its_first_token() -> None:
    """What the host would mask is not even filled; a grammar that finds no room is counted."""
    graph = gen_graph(Gen("g", SamplingParams(max_tokens=6), Regex("[ab]{3,6}")))
    engine, full = make_engine(50), make_engine(3)
    for each in (engine, full):
        session, collector = open_run(each, graph)
        while not collector.deltas:
            each.step()
        is_here = each is engine
        assert each.stats()["device_grammars"] == is_here
        assert each.stats()["grammars_refused"] == 1 - is_here
        session.cancel()
        drive(each)
        check_idle(each)


def test_a_stopped_engine_holds_nothing() -> None:
    engine = make_engine(50)
    _, collector = open_run(engine, gen_graph(Gen("g", SamplingParams(), Regex("[ab]{3,60}"))))
    while not collector.deltas:
        engine.step()
    engine.close()
    assert engine.stats()["device_grammars"] == 0
