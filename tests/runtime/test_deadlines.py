"""Time limits: what is due comes in order, and what is discarded is forgotten."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from umbel.runtime.deadlines import Deadlines

keys = st.integers(0, 5)
calls = st.one_of(
    st.tuples(st.just("add"), keys, st.integers(0, 20)),
    st.tuples(st.just("discard"), keys, st.just(0)),
    st.tuples(st.just("pop"), st.just(0), st.integers(0, 20)),
)


@given(st.lists(calls, max_size=40))
def test_it_agrees_with_a_plain_dict(script: list[tuple[str, int, int]]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    model: dict[int, int] = {}
    for name, key, at in script:
        if name == "add":
            deadlines.add(key, at)
            model[key] = at
        elif name == "discard":
            deadlines.discard(key)
            model.pop(key, None)
        else:
            due = deadlines.pop_due(at)
            assert sorted(due) == sorted(k for k, t in model.items() if t <= at)
            assert [model[k] for k in due] == sorted(model[k] for k in due)
            model = {k: t for k, t in model.items() if t > at}
        assert deadlines.earliest() == min(model.values(), default=None)
        assert len(deadlines) == len(model)


def test_a_time_that_never_comes_is_no_limit() -> None:
    deadlines: Deadlines[str] = Deadlines()
    deadlines.add("never", math.inf)
    deadlines.add("nonsense", math.nan)
    assert deadlines.earliest() is None


def test_memory_follows_what_is_in_force() -> None:
    deadlines: Deadlines[object] = Deadlines()
    for i in range(1000):
        deadlines.add(i, 1e9 + i)
        deadlines.discard(i)
    assert len(deadlines._heap) < 100
