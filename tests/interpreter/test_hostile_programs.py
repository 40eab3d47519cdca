"""Rule 3 for programs that do what nobody expects: whatever they raise or start, all of it ends."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import ScriptedCall
from umbel.interpreter.def_threads import DefThreads
from umbel.interpreter.interpreter import Interpreter
from umbel.lang.errors import MAX_CAUSES, causes_of, described, from_wire, to_wire
from umbel.lang.runner import BatchOptions, use_runner

from .conftest import MakeBackend

T = TypeVar("T")
PATIENCE_S = 20.0  # after which something counts as hung


def ends(work: Callable[[], T]) -> T:
    """Return what `work` does, in a thread of its own, so that a hang is seen."""
    found: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it hangs"
    value, error = found[0]
    if error is not None:
        raise error
    return value  # type: ignore[return-value]  # None only beside an error


class SilentError(Exception):
    """What a program raises when the author of its class made a mistake."""

    def __str__(self) -> str:
        raise RuntimeError("no message")


class SilentUmbelError(ub.BackendError):
    def __str__(self) -> str:
        raise RuntimeError("no message")


class ChainedError(Exception):
    pass


def chained() -> ChainedError:
    """Return an error whose chain of causes comes back to it."""
    first, second = ChainedError("first"), ChainedError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def ways(program: ub.Program[Any, Any], tmp_path: Path) -> list[Callable[[], object]]:
    """Return all ways to run a program, each of which should raise."""
    rows: list[Any] = [{}, {}]

    async def on_loop() -> None:
        await program.arun()

    async def streamed_on_loop() -> None:
        async for _ in program.astream():
            pass

    async def batch_on_loop() -> None:
        await program.arun_batch(rows, retries=1, backoff=0)

    return [
        program.run,
        lambda: list(program.stream()),
        lambda: program.run_batch(rows),
        lambda: program.run_batch(rows, retries=1, backoff=0),
        lambda: program.run_batch(rows, results_file=tmp_path / "results.jsonl"),
        lambda: asyncio.run(on_loop()),
        lambda: asyncio.run(streamed_on_loop()),
        lambda: asyncio.run(batch_on_loop()),
    ]


@pytest.mark.parametrize(
    ("make", "kind"),
    [(SilentError, SilentError), (SilentUmbelError, SilentUmbelError), (chained, ChainedError)],
)
@pytest.mark.parametrize("way", range(8))
def test_rule_3_whatever_a_body_raises_comes_out(
    scripted: MakeBackend,
    tmp_path: Path,
    make: Callable[..., Exception],
    kind: type[Exception],
    way: int,
) -> None:
    scripted(lambda call: "a")

    def body(s: ub.State) -> None:
        s += "x" + ub.gen("g")
        raise make() if make is chained else make("text")

    with pytest.raises(kind):
        ends(ways(ub.function(body), tmp_path)[way])


@pytest.mark.parametrize(
    "make", [SilentError, SilentUmbelError, chained, KeyboardInterrupt, SystemExit, StopIteration]
)
def test_rule_3_whatever_a_script_raises_fails_its_node(
    scripted: MakeBackend, make: Callable[..., BaseException]
) -> None:
    raised = iter([True])

    def script(call: ScriptedCall) -> str:
        if next(raised, False):
            raise make()
        return "a"

    def make_text(s: ub.State) -> None:
        s += "x" + ub.gen("g")

    backend = scripted(script)
    if make is SilentUmbelError:
        make = lambda: SilentUmbelError("text")  # noqa: E731
    program = ub.function(make_text).options(backend=backend)
    with pytest.raises(ub.GenerationError, match="'g' "):
        ends(program.run)
    assert ends(program.run).text() == "xa"


def test_a_chain_of_causes_travels_as_far_as_it_is_one() -> None:
    assert [str(one) for one in causes_of(chained())] == ["first", "second"]
    assert described(SilentError()).startswith("SilentError: (its message can't be shown")
    error: BaseException = ValueError("0")
    for i in range(1, 5000):
        above = ub.BackendError(str(i))
        above.__cause__, error = error, above
    assert len(list(causes_of(from_wire(to_wire(error))))) == MAX_CAUSES


# --- numbers ------------------------------------------------------------------------------------

NO_NUMBERS: list[Any] = [True, "3", None, 1j, [1]]


@pytest.mark.parametrize("value", [*NO_NUMBERS, 1.5, math.nan, math.inf])
@pytest.mark.parametrize("name", ["max_in_flight", "retries"])
def test_counts_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} is a whole number"):
        BatchOptions(**{name: value})


@pytest.mark.parametrize("value", [x for x in NO_NUMBERS if x is not None])
def test_times_are_numbers(value: Any) -> None:
    with pytest.raises(TypeError, match="backoff is a number of seconds"):
        BatchOptions(backoff=value)
    with pytest.raises(TypeError, match="timeout is a number of seconds"):
        ub.gen("g", timeout=value)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, 1e300])
def test_times_are_such_that_a_clock_can_wait_for_them(value: float) -> None:
    with pytest.raises(ValueError, match="backoff"):
        BatchOptions(backoff=value)
    with pytest.raises(ValueError, match="timeout"):
        ub.gen("g", timeout=value)


def test_a_wait_between_retries_stays_a_number_of_seconds() -> None:
    assert BatchOptions(backoff=0.5).delay(3) == 4.0
    assert 0 < BatchOptions(backoff=1e-9).delay(5000) < math.inf
    assert BatchOptions(backoff=0.0).delay(5000) == 0.0


# --- programs inside programs -------------------------------------------------------------------


def in_streams(depth: int) -> ub.Program[[], None]:
    """Return a program that reads the stream of one that reads the stream of ..., `depth` deep."""

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("g")
        if depth:
            s += "".join(in_streams(depth - 1).stream())

    return program


@pytest.mark.parametrize("max_threads", [1, 2])
def test_rule_5_bodies_that_wait_for_bodies_never_wait_for_their_threads(
    scripted: MakeBackend, max_threads: int
) -> None:
    backend = scripted(lambda call: "a")
    interpreter = Interpreter(backend, max_def_threads=max_threads)

    async def on_loop() -> list[str]:
        results = await asyncio.gather(*(in_streams(3).arun() for _ in range(4)))
        return [result.text() for result in results]

    def work() -> tuple[list[str], list[str]]:
        with use_runner(interpreter):
            batch = [result.text() for result in in_streams(3).run_batch([{}] * 4)]
            return batch, asyncio.run(on_loop())

    assert ends(work) == (["aaaa"] * 4, ["aaaa"] * 4)


def test_rule_5_threads_for_bodies_are_bounded_and_kept_while_there_is_work() -> None:
    threads, seen, most = DefThreads(3), set(), [0, 0]
    lock = threading.Lock()

    def work() -> None:
        with lock:
            seen.add(threading.current_thread())
            most[0] += 1
            most[1] = max(most)
        threading.Event().wait(0.002)
        with lock:
            most[0] -= 1

    for done in [threads.submit(work) for _ in range(60)]:
        done.result(PATIENCE_S)
    assert 1 <= most[1] <= 3
    assert len(seen) <= 3


def test_a_script_that_runs_a_program_on_its_own_backend_is_told_so(scripted: MakeBackend) -> None:
    made: list[ScriptedBackend] = []

    @ub.function
    def program(s: ub.State) -> None:
        s += "x" + ub.gen("g")

    made.append(scripted(lambda call: program.options(backend=made[0]).run().text()))
    with pytest.raises(ub.GenerationError, match="can't run programs on its own backend"):
        ends(program.run)


# --- processes ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_rule_3_a_fork_of_the_process_is_told_to_open_its_own_backend(
    scripted: MakeBackend,
) -> None:
    backend = scripted(lambda call: "a")

    @ub.function
    def program(s: ub.State) -> None:
        s += "x" + ub.gen("g")

    assert program.run().text() == "xa"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            program.run()
        except ub.GenerationError as error:
            is_told = "make a backend after the fork" in str(error)
            with ScriptedBackend(lambda call: "b") as own:
                text = "".join(program.options(backend=own).stream())
                code = 0 if is_told and text == "xb" else 2
        finally:
            os._exit(code)
    _, status = ends(lambda: os.waitpid(child, 0))
    assert os.waitstatus_to_exitcode(status) == 0
    assert program.options(backend=backend).run().text() == "xa"


LEFT_BEHIND = """
import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply

@ub.function
def program(s):
    s += "x" + ub.gen("g")
    s["g"]

ub.set_default_backend(ScriptedBackend(lambda call: Reply(stalls=True)))
for text in program.stream():
    print(text)
    break
"""


def test_rule_3_a_stream_that_is_left_behind_does_not_hold_up_the_end_of_the_process() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("x\n", "", 0)


# --- what no backend can be asked for -----------------------------------------------------------

DEEP_SCHEMA: dict[str, Any] = functools.reduce(lambda inner, _: {"items": inner}, range(5000), {})


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"max_tokens": 2**70}, ValueError),
        ({"top_k": 2**70}, ValueError),
        ({"seed": 2**70}, ValueError),
        ({"seed": -(2**70)}, ValueError),
        ({"n": 10**9}, ValueError),
        ({"max_thinking_tokens": 2**70, "thinking": True}, ValueError),
        ({"stop_token_ids": [2**70]}, ValueError),
        ({"logit_bias": {2**70: 1.0}}, ValueError),
        ({"logit_bias": {1: math.nan}}, ValueError),
        ({"logit_bias": {"a": 1}}, TypeError),
        ({"logit_bias": [1]}, TypeError),
        ({"regex": "(" * 5000 + "a" + ")" * 5000}, ub.ConstraintError),
        ({"stop_regex": "(" * 5000 + "a" + ")" * 5000}, ub.ConstraintError),
        ({"schema": DEEP_SCHEMA}, ub.ConstraintError),
    ],
)
def test_rule_1_what_no_backend_can_count_to_or_follow_is_refused_on_its_line(
    options: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        ub.gen("g", **options)
