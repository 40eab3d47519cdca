"""Random programs as data, and what they give when they are run in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import strategies as st

import umbel as ub
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall

Ending = Literal["ok", "fails", "times out", "is cut"]


@dataclass(frozen=True)
class Write:
    """Appends text."""

    text: str


@dataclass(frozen=True)
class Generate:
    """Appends a gen that ends in one way."""

    ending: Ending


@dataclass(frozen=True)
class Choose:
    """Appends a select."""

    fails: bool


@dataclass(frozen=True)
class Refer:
    """Appends the text of a value written before, counted from the latest."""

    back: int


@dataclass(frozen=True)
class Split:
    """Forks, lets each branch write, and joins."""

    branches: tuple[tuple[Step, ...], ...]
    policy: Literal["all", "collect", "any"]
    mode: Literal["gather", "append"]


@dataclass(frozen=True)
class Side:
    """Copies the state, writes there, and cancels the copy."""

    steps: tuple[Step, ...]


Step = Write | Generate | Choose | Refer | Split | Side


def programs(policies: Sequence[str] = ("all", "collect")) -> st.SearchStrategy[tuple[Step, ...]]:
    """Return a strategy for programs; forks nest two deep."""
    endings = st.sampled_from(["ok", "ok", "ok", "fails", "times out", "is cut"])
    leaf: st.SearchStrategy[Step] = st.one_of(
        st.builds(Write, st.text("ab ", max_size=3)),
        st.builds(Generate, endings),
        st.builds(Choose, st.sampled_from([False, False, False, True])),
        st.builds(Refer, st.integers(0, 3)),
    )

    def inside(steps: st.SearchStrategy[Step]) -> st.SearchStrategy[Step]:
        body = st.lists(steps, max_size=3).map(tuple)
        return st.one_of(
            steps,
            st.builds(
                Split,
                st.lists(body, min_size=1, max_size=3).map(tuple),
                st.sampled_from(policies),
                st.sampled_from(["gather", "append"]),
            ),
            st.builds(Side, body),
        )

    return st.lists(inside(inside(leaf)), max_size=6).map(tuple)


def answer(call: ScriptedCall) -> Reply:
    """Answer by what the name says and by the prompt, so that a wrong prefix shows."""
    _, _, kind = call.name.partition(":")
    if kind == "fails":
        return Reply(error=ub.BackendError(f"{call.name} is down", backend="scripted"))
    if kind == "times out":
        return Reply(stalls=True)
    if kind == "choice":
        return Reply(text="ab"[len(call.prompt) % 2])
    return Reply(text=f"<{len(call.prompt)} {len(call.prompt) % 7} x>")


@dataclass
class Outcome:
    """What a program gave: values, and why others are not there."""

    text: Any = None
    values: dict[str, Any] = field(default_factory=dict)


class Writer:
    """Writes a program into a state; stepwise it reads after every step."""

    def __init__(self, *, stepwise: bool) -> None:
        self.stepwise = stepwise
        self.written: dict[str, ub.State] = {}  # name -> the state it can be read from
        self.lost: dict[str, str] = {}  # names that could not be written -> the failure's address

    def write(
        self, s: ub.State, steps: Sequence[Step], names: tuple[str, ...] = (), place: str = ""
    ) -> None:
        """Write the steps; `names` can be referred to, `place` tells where the steps are."""
        failure: str | None = None
        for i, step in enumerate(steps):
            here = f"{place}{i}"
            if failure is None:
                try:
                    names = self._step(s, step, here, names)
                    if self.stepwise:
                        s.text()
                except ub.GenerationError as error:
                    failure = error.address
            if failure is not None:
                lost = [name for name in names_in(step, here) if name not in self.written]
                self.lost = {**dict.fromkeys(lost, failure), **self.lost}

    def _step(self, s: ub.State, step: Step, here: str, names: tuple[str, ...]) -> tuple[str, ...]:
        match step:
            case Write(text=text):
                s += text
            case Generate(ending=ending):
                limits: Any = {"max_tokens": 2, "regex": "<.*>"} if ending == "is cut" else {}
                timeout = 0.01 if ending == "times out" else 30.0
                return self._value(s, ub.gen(f"{here}:{ending}", timeout=timeout, **limits), names)
            case Choose(fails=fails):
                name = f"{here}:{'fails' if fails else 'choice'}"
                return self._value(s, ub.select(name, ["a", "b"]), names)
            case Refer(back=back):
                if names:
                    s += "see " + s.var(names[-1 - back % len(names)])
            case Split():
                self._split(s, step, here, names)
            case Side(steps=steps):
                side = s.copy()
                self.write(side, steps, names, f"{here}.")
                side.cancel()
                self._forget(f"{here}.")
        return names

    def _value(self, s: ub.State, expr: Any, names: tuple[str, ...]) -> tuple[str, ...]:
        s += expr
        self.written[expr.name] = s
        return (*names, expr.name)

    def _split(self, s: ub.State, step: Split, here: str, names: tuple[str, ...]) -> None:
        forks = s.fork(len(step.branches))
        for i, (branch, steps) in enumerate(zip(forks, step.branches, strict=True)):
            self.write(branch, steps, names, f"{here}[{i}].")
        joined = forks.join(step.policy, step.mode)
        if self.stepwise and step.policy != "all":
            _ = joined.errors

    def _forget(self, place: str) -> None:
        """Leave out what a cancelled copy wrote: whether it came first is chance."""
        for names in (self.written, self.lost):
            for name in [name for name in names if name.startswith(place)]:
                del names[name]


def names_in(step: Step, here: str) -> list[str]:
    """Return the names that a step would have written."""
    match step:
        case Generate(ending=ending):
            return [f"{here}:{ending}"]
        case Choose(fails=fails):
            return [f"{here}:{'fails' if fails else 'choice'}"]
        case Split(branches=branches):
            return [
                name
                for i, steps in enumerate(branches)
                for j, inner in enumerate(steps)
                for name in names_in(inner, f"{here}[{i}].{j}")
            ]
        case _:
            return []


def outcome_of(s: ub.State, writer: Writer) -> Outcome:
    """Read all that a program wrote from its states."""
    outcome = Outcome(text=_read(s.text))
    for name, state in writer.written.items():
        outcome.values[name] = _read(lambda state=state, name=name: state[name])
    for name, address in writer.lost.items():
        if name not in outcome.values:
            outcome.values[name] = ("failed", address)
    return outcome


def _read(read: Any) -> Any:
    try:
        return read()
    except ub.TruncatedError as error:
        return ("truncated", error.partial)
    except ub.GenerationError as error:
        return ("failed", error.address)
