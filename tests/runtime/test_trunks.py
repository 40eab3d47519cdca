"""Trunks that runs are told of: computed once, kept while any such run is open, and let go."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.engine_harness import (
    TOKENIZER,
    Collector,
    check_idle,
    drive,
    make_engine,
    make_runner,
)

from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Gen, Op, RoleEnd, Text
from umbel.lang.results import RunOptions
from umbel.lang.sampling_params import SamplingParams
from umbel.runtime.engine import Engine
from umbel.runtime.engine_session import EngineSession
from umbel.runtime.prefix_bound import PrefixBound
from umbel.runtime.token_row import RowBuilder, TokenRow
from umbel.runtime.trunks import Trunks

STEM = "you sort the mails of a house: " * 8
PAGES_AND_OVERLAP = [(size, overlap) for size in (1, 16) for overlap in (False, True)]


def chain(*ops: Op) -> RequestGraph:
    return RequestGraph(
        tuple(GraphNode(i, str(i), op, i - 1 if i else None) for i, op in enumerate(ops))
    )


def trunk_of(text: str = STEM) -> RequestGraph:
    return chain(Text((text,)))


def gen(num: int = 3) -> Gen:
    return Gen("x", SamplingParams(max_tokens=num, ignore_eos=True))


def keep(engine: Engine, trunk: RequestGraph | None) -> EngineSession:
    """Do what a batch does: keep a run open that has no nodes."""
    return engine.open(RunOptions(trunk=trunk), Collector())


def submit(
    engine: Engine, row: int, text: str, trunk: RequestGraph | None = None, num: int = 3
) -> Collector:
    collector = Collector()
    session = engine.open(RunOptions(seed=3, row=row, trunk=trunk), collector)
    session.extend(chain(Text((text,)), gen(num)))
    session.close()
    return collector


def traffic(engine: Engine, source: random.Random, num: int = 12) -> None:
    """Run programs that share nothing, until what they leave has filled the pool."""
    for _ in range(num):
        submit(engine, source.randrange(2**30), "".join(source.choices("defghij", k=150)))
    drive(engine)


def least_beside(trunk: list[int], texts: Sequence[str]) -> int:
    """Return the distinct prefixes of some rows beside those of their trunk."""
    rows = RowBuilder(TOKENIZER)
    bound = PrefixBound()
    bound.add_prompt("", trunk)
    for text in texts:
        bound.add_prompt("", rows.encode(TokenRow(), then=text))
    return bound.least_prefill - len(trunk)


def num_tokens(text: str) -> int:
    """Tokens of a text whose end may still merge with what follows, from below; with BOS."""
    return len(TOKENIZER.encode_text(text))


def promises(engine: Engine) -> list[Any]:
    return [promise for kept in engine.core.holds._promises.values() for promise in kept]


def prefilled(engine: Engine) -> float:
    return engine.stats()["tokens_prefilled"]


# --- counts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "overlap"), PAGES_AND_OVERLAP)
def test_a_trunk_is_computed_once_for_a_thousand_rows_that_come_late(
    page_size: int, overlap: bool
) -> None:
    """Rows come fifty at a time, and between them others take all of the pool."""
    computed = {}
    for is_told in (True, False):
        engine = make_engine(
            make_runner(num_slots=768),
            page_size=page_size,
            overlap=overlap,
            check_accounting=False,
            max_step_tokens=256,
            max_running=16,
        )
        trunk = trunk_of() if is_told else None
        keeper = keep(engine, trunk)
        drive(engine)
        source = random.Random(0)
        computed[is_told] = prefilled(engine)
        least = 0
        num_kept = computed[is_told]  # the trunk, before any row
        for first in range(0, 1000, 50):
            traffic(engine, source)
            before = prefilled(engine)
            texts = [f"{STEM}{row:03}" for row in range(first, first + 50)]
            collectors = [submit(engine, first + i, text, trunk) for i, text in enumerate(texts)]
            drive(engine)
            assert all(len(collector.results) == 2 for collector in collectors)
            computed[is_told] += prefilled(engine) - before
            least += least_beside(promises(engine)[0].token_ids, texts) if is_told else 0
        keeper.close()
        drive(engine)
        check_idle(engine)
        assert not promises(engine)
        if is_told and page_size == 1:
            assert computed[True] == num_kept + least
        elif is_told:  # the page in which rows part, too
            assert computed[True] <= num_kept + 20 * 16 + 1000 * (3 + 1)
    assert computed[False] - computed[True] > 18 * 200, "the trunk, nearly each time"


@pytest.mark.parametrize(("page_size", "overlap"), PAGES_AND_OVERLAP)
def test_rows_that_come_with_their_trunk_compute_it_once(page_size: int, overlap: bool) -> None:
    engine = make_engine(page_size=page_size, overlap=overlap, track_bound=True, max_step_tokens=40)
    trunk = trunk_of()
    keeper = keep(engine, trunk)
    collectors = [submit(engine, row, f"{STEM}{row}", trunk) for row in range(20)]
    drive(engine)
    assert all(len(c.results) == 2 for c in collectors)
    if page_size == 1:
        assert prefilled(engine) == engine.stats()["least_prefill"]
    else:  # each row's part of a page, and what it has of its own
        assert prefilled(engine) < num_tokens(STEM) + 20 * (16 + 2)
    keeper.close()
    drive(engine)
    check_idle(engine)


def test_a_trunk_is_there_before_the_first_row_comes() -> None:
    engine = make_engine(track_bound=True)
    keeper = keep(engine, trunk_of())
    drive(engine)
    computed = prefilled(engine)
    assert 0 <= num_tokens(STEM) - computed <= 2, "but for an end that may change"
    assert engine.stats()["kv_slots_free"] == engine.stats()["kv_slots"] - computed
    assert engine.core.cache.num_protected == 0
    engine.close()
    del keeper


def test_what_is_cached_or_being_computed_is_not_computed_again() -> None:
    engine = make_engine(max_step_tokens=16)
    first = submit(engine, 0, f"{STEM}0")
    for _ in range(3):
        engine.step()  # in the middle of its prefill
    keeper = keep(engine, trunk_of())
    drive(engine)
    assert len(first.results) == 2
    after = prefilled(engine)
    assert after == first.results[1].usage.prompt_tokens
    again = keep(engine, trunk_of(STEM[:100]))
    drive(engine)
    assert prefilled(engine) == after
    assert len(promises(engine)) == 2
    assert all(p.num_cached == len(p.token_ids) for p in promises(engine))
    for session in (keeper, again):
        session.close()
    drive(engine)
    assert not promises(engine)


def test_without_a_cache_trunks_are_nothing() -> None:
    engine = make_engine(prefix_cache=False)
    keeper = keep(engine, trunk_of())
    drive(engine)
    assert prefilled(engine) == 0
    assert not promises(engine)
    keeper.close()
    drive(engine)


def test_a_trunk_larger_than_its_share_is_kept_in_part() -> None:
    engine = make_engine(make_runner(num_slots=100), page_size=16)
    keeper = keep(engine, trunk_of())
    drive(engine)
    (promise,) = promises(engine)
    assert promise.num_cached == len(promise.token_ids) == 48  # whole pages of half of the pool
    keeper.close()
    drive(engine)
    check_idle(engine)


def test_a_trunk_that_cannot_be_encoded_is_its_rows_affair() -> None:
    engine = make_engine()
    for broken in (chain(RoleEnd("user")), chain(Text(("\ud800" * 70,))), chain(gen())):
        keeper = keep(engine, broken)
        drive(engine)
        assert not promises(engine)
        keeper.close()
    drive(engine)
    check_idle(engine)


# --- lives -------------------------------------------------------------------------------------


def test_a_promise_lasts_as_long_as_any_run_that_was_told() -> None:
    engine = make_engine()
    first, second = keep(engine, trunk_of()), keep(engine, trunk_of())
    drive(engine)
    assert len(promises(engine)) == 1, "equal trunks are one"
    first.close()
    drive(engine)
    assert len(promises(engine)) == 1
    second.cancel()
    second.close()
    drive(engine)
    assert not promises(engine)
    assert not engine.core.executor.runs
    check_idle(engine)


def test_promises_are_bounded_in_number_and_size() -> None:
    engine = make_engine(make_runner(num_slots=1200))
    names = [f"{i:02}" for i in range(Trunks.MOST_PROMISES + 4)]
    keepers = [keep(engine, trunk_of(name)) for name in names]
    drive(engine)
    assert len(promises(engine)) == Trunks.MOST_PROMISES
    kept = [TOKENIZER.decode(promise.token_ids) for promise in promises(engine)]
    assert kept == [name[: len(text)] for name, text in zip(names[4:], kept, strict=True)]
    big = [keep(engine, trunk_of(f"{i} {STEM}")) for i in range(4)]
    drive(engine)
    assert sum(len(p.token_ids) for p in promises(engine)) <= Trunks.SHARE * 1200
    again = keep(engine, trunk_of(names[0]))  # told anew: it is the last to go
    drive(engine)
    assert TOKENIZER.decode(promises(engine)[-1].token_ids) == names[0]
    for session in (*keepers, *big, again):
        session.close()
    drive(engine)
    check_idle(engine)
    assert not promises(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_steps", range(6))
def test_a_trunk_that_nobody_needs_any_more_is_not_computed_further(
    num_steps: int, overlap: bool
) -> None:
    engine = make_engine(max_step_tokens=16, overlap=overlap)
    keeper = keep(engine, trunk_of())
    for _ in range(num_steps):
        engine.step()
    other = submit(engine, 0, f"{STEM}0")  # waits for it
    engine.step()
    keeper.close()
    drive(engine)
    assert len(other.results) == 2
    check_idle(engine)
    assert not promises(engine)


def test_a_pass_that_fails_ends_the_prefetch_and_not_its_rows() -> None:
    def fails(_: Sequence[int]) -> bool:
        raise RuntimeError("a kernel failed")

    runner = make_runner()
    engine = make_engine(runner, max_step_tokens=16)
    keeper = keep(engine, trunk_of())
    engine.step()
    forward, runner.forward = runner.forward, fails  # type: ignore[method-assign, assignment]
    engine.step()
    runner.forward = forward  # type: ignore[method-assign]
    assert engine.core.scheduler.num_running == engine.core.scheduler.num_waiting == 0
    row = submit(engine, 0, f"{STEM}0", trunk_of())
    drive(engine)
    assert len(row.results) == 2
    (promise,) = promises(engine)
    assert promise.num_cached == len(promise.token_ids)
    keeper.close()
    drive(engine)
    check_idle(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_engine_that_stops_leaves_no_prefetch(num_steps: int) -> None:
    engine = make_engine(max_step_tokens=16)
    keep(engine, trunk_of())
    row = submit(engine, 0, f"{STEM}0", trunk_of())
    for _ in range(num_steps):
        engine.step()
    engine.close()
    assert row.num_ended == 2
    engine.core.scheduler.check()
    assert engine.core.scheduler.num_running == engine.core.scheduler.num_waiting == 0


# --- the same outputs ----------------------------------------------------------------------------

TEXTS = st.sampled_from(["", "a", "abc", " the", STEM[:40], STEM[:90], STEM, STEM + "x"])


@given(
    rows=st.lists(st.tuples(TEXTS, TEXTS, st.integers(0, 4)), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 16]),
    overlap=st.booleans(),
    num_slots=st.sampled_from([288, 320, 1024]),
    budget=st.integers(3, 64),
    cancelled=st.sets(st.integers(0, 7)),
)
def test_rows_give_the_same_whatever_they_were_told(
    rows: list[tuple[str, str, int]],
    page_size: int,
    overlap: bool,
    num_slots: int,
    budget: int,
    cancelled: set[int],
) -> None:
    """A trunk may even be another one's; pools are so small that one long row fills them."""
    outcomes = []
    for is_told in (True, False):
        engine = make_engine(
            make_runner(num_slots=num_slots if is_told else 4096),
            page_size=page_size,
            overlap=overlap,
            max_step_tokens=budget,
            prefix_cache=is_told,
            max_running=3,
        )
        found = []
        for row, (told, text, num_steps) in enumerate(rows):
            trunk = trunk_of(told) if is_told else None
            keeper = keep(engine, trunk)
            collector = submit(engine, row, text + "abc", trunk, num=6)
            if row in cancelled:
                keeper.cancel()
            else:
                found.append(collector)
            keeper.close()
            for _ in range(num_steps):
                engine.step()
        drive(engine, max_steps=4000)
        check_idle(engine)
        assert not promises(engine)
        outcomes.append([collector.outcome() for collector in found])
    assert outcomes[0] == outcomes[1]
