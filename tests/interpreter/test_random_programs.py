"""Random programs give the same stepwise and compiled, and leave no waiter behind."""

from __future__ import annotations

import contextlib
import random
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import given

import umbel as ub
from umbel.interpreter.backends.base import EventSink
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall
from umbel.interpreter.graph_run import GraphRun
from umbel.lang.errors import WireError
from umbel.lang.graph import RequestGraph
from umbel.lang.results import Event, NodeFailed, NodeFinished, NodeResult, RunOptions

from .random_programs import Outcome, Step, Writer, answer, outcome_of, programs


def perform(
    backend: ScriptedBackend, steps: Sequence[Step], *, stepwise: bool
) -> tuple[Outcome, GraphRun]:
    writer = Writer(stepwise=stepwise)
    states: list[ub.State] = []
    runs: list[Any] = []  # a state lets go of its run when that has ended

    @ub.function
    def program(s: ub.State) -> None:
        states.append(s)
        runs.append(s._run)
        writer.write(s, steps)

    with ub.use_backend(backend), contextlib.suppress(ub.GenerationError):
        program.run()
    run = runs[0]
    assert isinstance(run, GraphRun)
    return outcome_of(states[0], writer), run


def check_ended(run: GraphRun) -> None:
    """Every node has its outcome, and nobody waits."""
    assert run.is_ended
    assert not run._waiters
    assert run._callbacks == ()
    assert set(run._outcomes) == set(range(len(run.nodes)))


def is_same(one: Any, other: Any) -> bool:
    """Whether two outcomes agree; which of several failures fails a join is a matter of time."""
    if one == other:
        return True
    is_failure = one[0] == other[0] == "failed"
    return is_failure and "[" in one[1] and "[" in other[1]


@given(programs())
def test_rule_16_stepwise_and_compiled_runs_give_the_same(steps: tuple[Step, ...]) -> None:
    with ScriptedBackend(answer) as backend:
        stepwise, first = perform(backend, steps, stepwise=True)
        num_pieces = backend.num_pieces
        compiled, second = perform(backend, steps, stepwise=False)
        assert compiled.values.keys() == stepwise.values.keys()
        assert is_same(compiled.text, stepwise.text)
        assert [n for n, v in compiled.values.items() if not is_same(v, stepwise.values[n])] == []
        has_side = "Side" in repr(steps)  # a cancellation hands over what it cancels
        if second.nodes and not has_side:
            assert backend.num_pieces == num_pieces + 1
    for run in (first, second):
        check_ended(run)


@given(programs(("all", "collect", "any")))
def test_rule_3_no_program_leaves_a_waiter_behind(steps: tuple[Step, ...]) -> None:
    with ScriptedBackend(answer) as backend:
        for stepwise in (True, False):
            _, run = perform(backend, steps, stepwise=stepwise)
            check_ended(run)


class Faulty(ScriptedBackend):
    """Loses, repeats and invents events, refuses pieces, or dies, as its dice say."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        super().__init__(self.reply)
        self.fault = dice.choice(["none", "loses", "repeats", "invents", "refuses", "dies"])

    def reply(self, call: ScriptedCall) -> Reply:
        kind = self.dice.choice(["ok", "ok", "raises", "stalls", "garbage", "cut"])
        if kind == "raises":
            raise self.dice.choice([ub.BackendConnectionError("dropped"), ValueError("bad")])
        text = "garbage" if kind == "garbage" else "12"
        return Reply(text=text, stalls=kind == "stalls", accepting=kind != "cut")

    def open(self, options: RunOptions, sink: EventSink) -> Any:
        if self.fault == "refuses" and self.dice.random() < 0.5:
            raise ub.BackendConnectionError("can't be reached")
        if self.fault == "dies":
            threading.Timer(self.dice.random() * 0.02, self.close).start()
        session = super().open(options, self._spoiled(sink))
        if self.fault == "refuses":
            self._refuse(session)
        return session

    def _spoiled(self, sink: EventSink) -> EventSink:
        def deliver(events: Sequence[Event]) -> None:
            if self.fault == "loses":
                events = [event for event in events if self.dice.random() < 0.7]
            if self.fault == "repeats":
                events = [*events, *events]
            if self.fault == "invents":
                events = [
                    NodeFinished(1000, NodeResult(text="x")),
                    NodeFailed(-1, WireError("Unheard", "of")),
                    *events,
                ]
            sink(events)

        return deliver

    def _refuse(self, session: Any) -> None:
        extend = session.extend

        def refuse(piece: RequestGraph) -> None:
            if self.dice.random() < 0.5:
                raise RuntimeError("broken pipe")
            extend(piece)

        session.extend = refuse


def end_of_one_faulty_run(seed: int) -> str:
    dice = random.Random(seed)

    @ub.function
    def program(s: ub.State) -> None:
        s += "text" + ub.gen("a", regex=r"\d+")
        forks = s.fork(3)
        for branch in forks:
            branch += ub.select("b", ["12", "13"]) + ub.gen("c", schema=int)
        joined = forks.join(dice.choice(["all", "collect", "any"]))
        if dice.random() < 0.7:
            _ = joined["c"]
        s += ub.gen("d")
        if dice.random() < 0.5:
            _ = s["d"]

    with Faulty(dice) as backend:
        try:
            program.options(backend=backend, timeout=0.15).run()
            end = "ended"
        except (ub.GenerationError, ub.TruncatedError) as error:
            end = str(error)
    return end


def test_rule_3_two_hundred_faulty_backends_wedge_nothing() -> None:
    with ThreadPoolExecutor(16) as pool:
        ends = list(pool.map(end_of_one_faulty_run, range(200)))
    assert len(ends) == 200
    failures = [end for end in ends if end != "ended"]
    assert 100 < len(failures) < 200
    # every error names its node by address
    place = re.compile(r"(^|\W)\d+(\.fork0\[\d\]\.\d)?\W")
    assert [end for end in failures if place.search(end) is None] == []
