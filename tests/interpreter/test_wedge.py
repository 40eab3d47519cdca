"""Rule 3 under fire: whatever breaks, a run ends in time, and its error names a node of it.

Random programs meet random faults on three backends: a script that raises, stalls, dawdles and
talks nonsense; an umbel server and OpenAI's routes, over a connection that drops, stalls and goes
on with garbage at any byte, and with a model that fails. What a fault did not touch is as it would
have been without.
"""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.hash_server import MODEL, hash_server

import umbel as ub
from umbel.interpreter.backends.base import Backend
from umbel.interpreter.backends.openai import OpenAIBackend
from umbel.interpreter.backends.openai_features import UMBEL_SERVER
from umbel.interpreter.backends.remote import RemoteBackend
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall

DEADLINE_S = 0.3  # of a run that meets a fault
PATIENCE_S = 20.0  # after which a run counts as hung; a run waits for nothing beyond its deadline
NUM_SCRIPTS = 200  # on the script, and half as many over each of the two wires

# --- programs ----------------------------------------------------------------------------------

Step = str | tuple[str, int]
STEPS = st.lists(
    st.one_of(
        st.sampled_from(["gen", "select", "read", "text"]),
        st.tuples(st.sampled_from(["fork", "collect"]), st.integers(1, 3)),
    ),
    min_size=1,
    max_size=5,
).map(lambda steps: ["gen", *steps])


@ub.function
def program(s: ub.State, steps: Sequence[Step]) -> None:
    """Do what the steps say; every gen and select is the whole of its turn."""
    s += ub.user("abc")
    for i, step in enumerate(steps):
        match step:
            case "gen":
                s += ub.assistant(ub.gen(f"g{i}", max_tokens=4)) + ub.user("ab")
            case "select":
                s += ub.assistant(ub.select(f"s{i}", ["a", "b"])) + ub.user("ca")
            case "text":
                s += ub.assistant("xyxy") + ub.user("é")
            case "read":
                s.text()
            case (kind, int(size)):
                forks = s.fork(size)
                for j, fork in enumerate(forks):
                    fork += ub.assistant(ub.gen("b", max_tokens=3))
                    fork += ub.user(f"{j}")
                if kind == "fork":
                    forks.join()
                else:
                    forks.join(policy="collect")
                s += ub.assistant("so") + ub.user("and")


def run(backend: Backend, steps: Sequence[Step], timeout: float | None = None) -> ub.Result[None]:
    """Run in a thread of its own, so that a run that hangs is seen."""
    results: list[ub.Result[None]] = []

    def work() -> None:
        chosen = program.options(backend=backend, timeout=timeout)
        results.extend(chosen.run_batch([{"steps": steps}], on_error="collect"))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), f"{steps} hangs"
    return results[0]


def check(result: ub.Result[None], expected: str | None) -> None:
    """An error names a node of the run; without one the text is what it always is."""
    error = result.error
    if error is None:
        assert expected is None or result.text() == expected
        return
    assert isinstance(error, ub.GenerationError), repr(error)
    assert isinstance(error.__cause__, ub.UmbelError), repr(error.__cause__)
    assert error.address
    assert re.search(rf"(?<![\w.\[]){re.escape(error.address)}(?![\w\[]|\.\d)", str(error)), error
    assert result.state is not None
    with pytest.raises(ub.GenerationError):
        result.text()  # at once, and again


# --- a script that goes wrong -------------------------------------------------------------------

REPLIES: list[Any] = [
    Reply(error=ub.BackendError("down", backend="scripted")),
    Reply(error=ub.BackendConnectionError("the connection dropped", backend="scripted")),
    Reply(error=RuntimeError("of a kind that nobody expects")),
    Reply(tokens=("a", "b"), error=ub.BackendError("half way", backend="scripted")),
    Reply(stalls=True),
    Reply(tokens=("a",), stalls=True),
    Reply(text="a", latency=0.002),
    Reply(tokens=("a", b"\xff", "b"), token_latency=0.001),
    "raises",
    "none",
    "no choice",
    "fine",
]


@settings(max_examples=NUM_SCRIPTS, deadline=None)
@given(steps=STEPS, faults=st.lists(st.sampled_from(REPLIES), min_size=1, max_size=3))
def test_rule_3_a_script_that_goes_wrong_wedges_nothing(
    steps: Sequence[Step], faults: list[Any]
) -> None:
    taken = iter(faults)

    def script(call: ScriptedCall) -> Any:
        fault = next(taken, "fine")
        match fault:
            case "raises":
                raise KeyError("a script with a bug")
            case "none":
                return None  # no answer at all
            case "no choice":
                return "neither" if call.name[0] == "s" else "x"
            case "fine":
                return "a"
            case Reply(tokens=tokens) if tokens and call.name[0] == "s":
                return "a"  # a select has no tokens
        return fault

    with ScriptedBackend(script) as backend:
        check(run(backend, steps, DEADLINE_S), None)


# --- a connection that goes wrong ---------------------------------------------------------------


@dataclass
class Model:
    """Whether the server's model fails: it raises in the next so many passes."""

    failures: int = 0

    def __call__(self, prefix: Sequence[int]) -> bool:
        if self.failures > 0:
            self.failures -= 1
            raise RuntimeError("the model broke")
        return False


@dataclass
class Wires:
    """A real server, backends that reach it through a proxy, and what each program should give."""

    proxy: FaultyProxy
    model: Model
    remote: Backend
    openai: Backend
    known: dict[str, str | None] = field(default_factory=dict, repr=False)

    def expected(self, backend: Backend, steps: Sequence[Step]) -> str | None:
        """Return the text without a fault.

        None where there is none: an endpoint that lists a hundred tokens can't score the others.
        """
        key = f"{backend.name}: {steps}"
        if key not in self.known:
            result = run(backend, steps)
            check(result, None)
            assert result.error is None or "select" in steps, result.error
            self.known[key] = result.text() if result.error is None else None
        return self.known[key]

    def meet(self, backend: Backend, steps: Sequence[Step], fault: Fault | int | None) -> None:
        expected = self.expected(backend, steps)
        if isinstance(fault, int):
            self.model.failures = fault
        else:
            self.proxy.set(fault)
        try:
            check(run(backend, steps, DEADLINE_S), expected)
        finally:
            self.model.failures = 0
            self.proxy.set(None)


@pytest.fixture(scope="module")
def wires() -> Iterator[Wires]:
    model = Model()
    with ExitStack() as stack:
        server = stack.enter_context(hash_server(poison=model))
        proxy = stack.enter_context(FaultyProxy(server.url))
        openai = OpenAIBackend(
            MODEL,
            base_url=proxy.url + "/v1",
            features=UMBEL_SERVER,
            backoff_s=0.001,
            max_retries=1,
        )
        remote = stack.enter_context(RemoteBackend(proxy.url))
        yield Wires(proxy, model, remote, stack.enter_context(openai))
    gc.collect()  # here, where it is expected, and not in somebody else's test


FAULTS = st.one_of(
    st.builds(
        Fault,
        st.sampled_from(["drop", "stall", "garbage", "refuse"]),
        st.integers(0, 1500),
        st.sampled_from([1, 1, 2, 50]),
    ),
    st.integers(1, 3),  # passes in which the model fails
    st.none(),
)


def over_a_wire(test: Callable[..., None]) -> Callable[..., None]:
    """Draw random programs and faults for a test."""
    given_both = given(steps=STEPS, fault=FAULTS)
    return settings(max_examples=NUM_SCRIPTS // 2, deadline=None)(given_both(test))


@over_a_wire
def test_rule_3_a_broken_wire_to_a_server_wedges_nothing(
    wires: Wires, steps: Sequence[Step], fault: Fault | int | None
) -> None:
    wires.meet(wires.remote, steps, fault)


@over_a_wire
def test_rule_3_a_broken_wire_to_an_endpoint_wedges_nothing(
    wires: Wires, steps: Sequence[Step], fault: Fault | int | None
) -> None:
    wires.meet(wires.openai, steps, fault)
