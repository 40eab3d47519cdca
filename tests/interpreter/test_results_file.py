"""Batches that are resumed from a results file: nothing lost, nothing run twice, nothing mixed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

import umbel as ub
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall

from . import square_programs
from .conftest import MakeBackend
from .square_programs import areader, reader


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


class Order(BaseModel):
    product: str
    quantity: int = 1
    mood: Mood = Mood.GOOD


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: float


class Pair(NamedTuple):
    order: Order
    point: Point


ANSWERS = {
    "order": '{"product":"lamp","mood":"bad"}',
    "point": '{"x":1,"y":2.5}',
    "mood": "good",
    "notes": "[1,2]",
    "cut": '{"product":"la',
    "wrong": "seven",
    "samples": "3",
    "text": "Grüße",
    "verdict": "no",
    "": "7",
}
NUMBER = ub.gen(schema=int)


@ub.function
def everything(s: ub.State, x: int) -> Pair:
    s += ub.system("Be brief.")
    s += ub.user(f"Row {x}")
    s += ub.assistant(ub.gen("order", schema=Order) + "; " + NUMBER)
    with s.capture("both"):
        s += ub.gen("text", stop="!") + ub.select("verdict", ["yes", "no"])
    s += ub.gen("point", schema=Point) + ub.gen("mood", schema=Mood)
    for _ in range(2):
        s += ub.gen("notes", schema=list[int], append=True)
    s += ub.gen("cut", schema=Order) + ub.gen("wrong", schema=int)
    s += ub.gen("samples", schema=int, n=2)
    s.pick("samples", 1)
    forks = s.fork(2)
    forks += ub.gen("text")
    forks[1].cancel()
    forks.join("collect")
    return Pair(s["order"], s["point"])


def answer_everything(call: ScriptedCall) -> Reply:
    return Reply(text=ANSWERS[call.name], accepting=call.name != "cut")


@ub.function
def square(s: ub.State, x: int) -> None:
    s += f"{x} squared is " + ub.gen("y", schema=int)


class Squares:
    """Answers squares of positive numbers, and notes the rows that were asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, call: ScriptedCall) -> Reply:
        x = int(call.prompt.split()[0])
        self.asked.append(call.row)
        if x < 0:
            raise ub.BackendError(f"{x} is negative")
        return Reply(text=str(x * x))

    def take(self) -> list[int]:
        taken, self.asked = sorted(self.asked), []
        return taken


def run(way: str, program: Any, rows: Any, path: Path, **options: Any) -> list[Any]:
    return square_programs.run(way, program, rows, results_file=path, **options)


WAYS = pytest.mark.parametrize("way", ["sync", "async"])
EACH = pytest.mark.parametrize("program", [square, reader, areader], ids=["none", "reads", "async"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def read_of(read: Any) -> Any:
    """Return what a read gives, or how it fails."""
    try:
        return read()
    except ub.UmbelError as error:
        return type(error), str(error), getattr(error, "partial", ""), repr(error.__cause__)


def check_same(one: Any, other: Any) -> None:
    assert (one.row, one.seed, one.attempt, one.error) == (
        other.row,
        other.seed,
        other.attempt,
        other.error,
    )
    assert one.value == other.value
    assert type(one.value) is type(other.value)
    assert one.names() == other.names()
    for name in one.names():
        live, back = read_of(lambda n=name: one[n]), read_of(lambda n=name: other[n])
        assert live == back
        assert type(live) is type(back)
        assert read_of(lambda n=name: one.meta(n)) == read_of(lambda n=name: other.meta(n))
    assert one.text() == other.text()
    assert one.messages == other.messages
    assert one.plan() == other.plan()


@WAYS
def test_what_is_read_back_equals_the_live_result(
    scripted: MakeBackend, path: Path, way: str
) -> None:
    backend = scripted(answer_everything)
    live = run(way, everything, [1, 2], path)
    num_runs = backend.num_runs
    back = run(way, everything, [1, 2], path)
    assert backend.num_runs == num_runs, "nothing was asked again"
    for one, other in zip(live, back, strict=True):
        check_same(one, other)
    result = back[0]
    assert result["order"] == Order(product="lamp", mood=Mood.BAD)
    assert result["order"].model_fields_set == {"product", "mood"}
    assert (result["mood"], result["point"]) == (Mood.GOOD, Point(1, 2.5))
    assert (result["notes"], result["samples"]) == ([[1, 2], [1, 2]], [3, 3])
    assert NUMBER in result
    assert (result[NUMBER], result.meta(NUMBER)) == (7, live[0].meta(NUMBER))
    with pytest.raises(ub.TruncatedError) as cut:
        result["cut"]
    assert cut.value.partial == ANSWERS["cut"]
    with pytest.raises(ub.GenerationError, match="is no valid int"):
        result["wrong"]
    with pytest.raises(ub.ProgramError, match="the run has ended"):
        result.state += "more"
    with pytest.raises(ub.UnknownNameError):
        result["other"]


@WAYS
@EACH
def test_only_rows_that_have_not_finished_are_run(
    scripted: MakeBackend, path: Path, way: str, program: Any
) -> None:
    squares = Squares()
    scripted(squares)
    first = run(way, program, [1, -2, 3], path, on_error="collect")
    assert squares.take() == [0, 1, 2]
    second = run(way, program, [1, 2, 3, 4, 5], path)  # the failed row mended, two more
    assert squares.take() == [1, 3, 4]
    assert [r["y"] for r in second] == [1, 4, 9, 16, 25]
    assert [r.row for r in second] == [0, 1, 2, 3, 4]
    assert {r.seed for r in second} == {first[0].seed}, "one seed for the batch, kept by the file"
    third = run(way, program, [1, 2, 3, 4, 5], path, ordered=False)
    assert squares.take() == []
    assert sorted(r["y"] for r in third) == [1, 4, 9, 16, 25]


@WAYS
@EACH
def test_failed_rows_are_run_again_and_fail_as_they_did(
    scripted: MakeBackend, path: Path, way: str, program: Any
) -> None:
    squares = Squares()
    scripted(squares)
    for _ in range(2):
        results = run(way, program, [1, -2, 3], path, on_error="collect")
        assert [r.error is None for r in results] == [True, False, True]
    assert squares.take() == [0, 1, 1, 2]
    with pytest.raises(ub.GenerationError, match="-2 is negative") as caught:
        run(way, program, [1, -2, 3], path)
    assert caught.value.__notes__ == ["in row 1 of the batch"]
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    failed = [line for line in lines if "error" in line]
    assert failed
    assert all(line["row"] == 1 for line in failed)
    assert "-2 is negative" in failed[0]["error"]["message"]


@WAYS
def test_what_ended_before_a_failure_or_an_interrupt_is_kept(
    scripted: MakeBackend, path: Path, way: str
) -> None:
    squares = Squares()
    scripted(squares)

    def rows() -> Iterator[int]:
        yield from range(8)
        deadline = time.monotonic() + 10
        while len(path.read_bytes().splitlines()) < 1 + 8 and time.monotonic() < deadline:
            time.sleep(0.005)
        raise KeyboardInterrupt

    if way == "async":  # its rows run while the loop does: interrupt it from there

        async def follow() -> None:
            num_seen = 0
            async for _ in reader.aiter_batch(range(100), results_file=path, max_in_flight=4):
                num_seen += 1
                if num_seen == 8:
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(follow())
    else:
        with pytest.raises(KeyboardInterrupt):
            run(way, reader, rows(), path)
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    kept = {line["row"] for line in lines if "error" not in line}
    assert kept >= set(range(8))
    squares.take()
    assert [r.value for r in run(way, reader, range(12), path)] == [x * x for x in range(12)]
    assert set(squares.take()) == set(range(12)) - kept


@WAYS
def test_a_torn_last_line_is_dropped_and_its_row_run_again(
    scripted: MakeBackend, path: Path, way: str
) -> None:
    squares = Squares()
    scripted(squares)
    run(way, reader.options(seed=5), [1, 2, 3], path, max_in_flight=1)
    whole = path.read_bytes()
    *_, before, last = whole.splitlines(keepends=True)
    assert json.loads(last)["row"] == 2
    squares.take()
    for cut in (1, 2, len(last) // 2, len(last) - 1):
        path.write_bytes(whole[:-cut])
        results = run(way, reader.options(seed=5), [1, 2, 3], path)
        assert [r.value for r in results] == [1, 4, 9]
        assert squares.take() == [2]
        lines = path.read_bytes().splitlines(keepends=True)
        assert lines[-2] == before
        assert [json.loads(line)["row"] for line in lines[1:]] == [0, 1, 2]
    header = whole.splitlines(keepends=True)[0]
    path.write_bytes(header[:-5])
    assert [r.value for r in run(way, reader.options(seed=5), [1], path)] == [1]


@WAYS
def test_a_finished_row_that_changed_is_refused(
    scripted: MakeBackend, path: Path, way: str
) -> None:
    squares = Squares()
    scripted(squares)
    run(way, square, [{"x": 1}, 2, (3,)], path)
    run(way, square, [(1,), {"x": 2}, 3], path)  # however they are given
    assert squares.take() == [0, 1, 2]
    with pytest.raises(ub.ProgramError, match=r"row 1 of the batch is not the row 1 that .* its"):
        run(way, square, [1, 5, 3], path, on_error="collect")
    assert run(way, square, [1, 2, 3], path)[1]["y"] == 4


def make(prompt: str, *, twice: bool = False) -> Any:
    if twice:

        @ub.function
        def program(s: ub.State, x: int) -> None:
            s += f"{x} " + prompt + ub.gen("y")
            s += ub.gen("z")
    else:

        @ub.function
        def program(s: ub.State, x: int) -> None:
            """Ask."""
            s += f"{x} " + prompt + ub.gen("y")

    return program


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (make("squared is"), r"write the new name and digest into the file's first line"),
        (make("cubed is", twice=True), "has rows of"),
        (make("cubed is").options(sampling={"temperature": 1.0}), "has rows of"),
        (make("cubed is").options(seed=4), "was begun with seed 3, not 4"),
        (square, "has rows of .*make.<locals>.program .* not of .*:square as it is now"),
    ],
    ids=["prompt", "body", "sampling", "seed", "other"],
)
def test_a_program_that_changed_is_refused(
    scripted: MakeBackend, path: Path, changed: Any, says: str
) -> None:
    scripted(Squares())
    make("cubed is").options(seed=3).run_batch([1, 2], results_file=path)
    make("cubed is").run_batch([1, 2], results_file=path)
    with pytest.raises(ub.ProgramError, match=says):
        changed.run_batch([1, 2], results_file=path)


def test_a_new_digest_in_the_first_line_keeps_the_rows(scripted: MakeBackend, path: Path) -> None:
    squares = Squares()
    scripted(squares)
    make("cubed is").run_batch([1], results_file=path)
    old = json.loads(path.read_text().splitlines()[0])["digest"]
    with pytest.raises(ub.ProgramError) as caught:
        make("squared is").run_batch([1, 2], results_file=path)
    new = str(caught.value).split("as it is now (")[1].split(")")[0]
    path.write_text(path.read_text().replace(old, new, 1))
    squares.take()
    make("squared is").run_batch([1, 2], results_file=path)
    assert squares.take() == [1]


def test_two_batches_do_not_share_a_file(scripted: MakeBackend, path: Path) -> None:
    scripted(Squares())
    first = square.iter_batch(range(50), results_file=path, max_in_flight=2)
    next(first)
    with pytest.raises(ub.ProgramError, match="is in use by another batch"):
        square.run_batch([1], results_file=path)
    assert [r["y"] for r in first] == [x * x for x in range(1, 50)]
    square.run_batch(range(50), results_file=path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("my precious notes", "its first line is not of that form"),
        ("a,b\n1,2\n", "line 1"),
        ('{"umbel_results":9,"program":"p","digest":"d","seed":1}\n', "its form is 9"),
        ('{"umbel_results":1,"program":"p","digest":"d","seed":1}\nx\n{}', "line 2"),
    ],
)
def test_files_of_another_kind_are_left_alone(
    scripted: MakeBackend, path: Path, content: str, says: str
) -> None:
    scripted(Squares())
    path.write_text(content)
    with pytest.raises(ub.ProgramError, match=says):
        square.run_batch([1], results_file=path)
    assert path.read_text().startswith(content.rsplit("\n", 1)[0])


def local_model() -> Any:
    class Local(BaseModel):
        x: int

    return Local


class Client:
    """Something of no stable form."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.file = sys.stdout


@WAYS
def test_what_can_not_be_stored_is_refused_before_anything_is_paid_for(
    scripted: MakeBackend, path: Path, way: str
) -> None:
    squares = Squares()
    scripted(squares)
    model = local_model()

    @ub.function
    def typed(s: ub.State, x: int) -> None:
        s += f"{x} " + ub.gen("y", schema=list[model])  # type: ignore[valid-type]

    @ub.function
    def returning(s: ub.State, x: int) -> Client:
        s += f"{x} " + ub.gen("y")
        return Client()

    @ub.function
    def plain(s: ub.State, x: Any) -> None:
        s += "1 " + ub.gen("y")

    with pytest.raises(ub.ProgramError, match=r"gen\('y'\) can't be kept .*Local.* found by its"):
        run(way, typed, [1, 2], path)
    with pytest.raises(ub.ProgramError, match=r"what .*returning returns .*Client have no form"):
        run(way, returning, [1], path.with_suffix(".2"))
    with pytest.raises(ub.ProgramError, match=r"argument 'x'\.lock.* has no form that stays"):
        run(way, plain, [Client()], path.with_suffix(".3"))
    with pytest.raises(TypeError, match="results_file is a path, not 7"):
        square.run_batch([1], results_file=7)  # type: ignore[arg-type]
    assert squares.take() == []


@WAYS
def test_a_return_value_that_can_not_be_stored_ends_the_batch(
    scripted: MakeBackend, path: Path, way: str
) -> None:
    scripted(Squares())

    @ub.function
    def program(s: ub.State, x: int) -> Any:
        s += f"{x} " + ub.gen("y")
        return Client() if x == 3 else (x, {x})

    with pytest.raises(ub.ProgramError, match=r"row 3 can't be kept in a results file: /value: "):
        run(way, program, range(6), path, max_in_flight=1, on_error="collect")
    assert [r.value for r in run(way, program, range(3), path)] == [(x, {x}) for x in range(3)]


class Broken(BaseModel):
    x: int

    def __getstate__(self) -> dict[Any, Any]:
        raise ZeroDivisionError("no state")


@WAYS
def test_whatever_goes_wrong_while_a_row_is_written_ends_the_batch(
    scripted: MakeBackend, path: Path, way: str
) -> None:
    scripted(Squares())

    @ub.function
    def program(s: ub.State, x: int) -> Broken:
        s += f"{x} " + ub.gen("y")
        return Broken(x=x)

    with pytest.raises(ZeroDivisionError, match="no state"):
        run(way, program, range(6), path, on_error="collect")


@WAYS
def test_a_full_disk_ends_the_batch_and_leaves_whole_lines(
    scripted: MakeBackend, path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(Squares())
    real, left = os.write, 1500

    def write(fd: int, data: Any) -> int:
        nonlocal left
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            return real(fd, data)
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        num = real(fd, data[:left])
        left -= num
        return num

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        run(way, square, range(20), path)
    monkeypatch.undo()
    lines = path.read_bytes().splitlines(keepends=True)
    assert 2 <= len(lines) < 20
    assert all(line.endswith(b"\n") and json.loads(line) for line in lines)
    assert [r["y"] for r in run(way, square, range(20), path)] == [x * x for x in range(20)]


@WAYS
def test_credentials_are_not_in_the_file(scripted: MakeBackend, path: Path, way: str) -> None:
    secret = "sk-abcdefghijklmnop1234"

    def refuse(call: ScriptedCall) -> Reply:
        if call.name == "y":
            return Reply(error=ub.BackendError(f"401 for Authorization: Bearer {secret}"))
        return Reply(text="fine")

    @ub.function
    def program(s: ub.State, fails: bool) -> None:
        forks = s.fork(2)
        forks[0] += ub.gen("y")
        forks.join("all" if fails else "collect")
        s += ub.gen("z")

    scripted(refuse)
    results = run(way, program, [True, False], path, on_error="collect")
    assert [r.error is None for r in results] == [False, True]
    assert secret not in path.read_text()
    assert path.read_text().count("[removed]") >= 2


@WAYS
def test_a_generator_is_pulled_as_there_is_room_when_its_rows_have_finished(
    scripted: MakeBackend, path: Path, way: str
) -> None:
    squares = Squares()
    scripted(squares)
    run(way, square, range(60), path)
    squares.take()
    num_pulled = num_taken = most = 0

    def rows() -> Iterator[int]:
        nonlocal num_pulled, most
        for x in range(60):
            num_pulled += 1
            most = max(most, num_pulled - num_taken)
            yield x

    if way == "sync":
        for result in square.iter_batch(rows(), max_in_flight=4, results_file=path):
            assert result["y"] == result.row**2
            num_taken += 1
    else:

        async def follow() -> None:
            nonlocal num_taken
            async for _ in square.aiter_batch(rows(), max_in_flight=4, results_file=path):
                num_taken += 1

        asyncio.run(follow())
    assert (num_taken, squares.take()) == (60, [])
    assert most <= 2 * 4 + 1


@WAYS
def test_retried_rows_are_written_once(scripted: MakeBackend, path: Path, way: str) -> None:
    asked: list[int] = []

    def flaky(call: ScriptedCall) -> Reply:
        asked.append(call.row)
        if asked.count(call.row) == 1:
            raise ub.BackendConnectionError("dropped", retryable=True)
        return Reply(text="4")

    scripted(flaky)
    results = run(way, square, [2, 2], path, retries=2, backoff=0.0)
    assert [r.attempt for r in results] == [1, 1]
    assert len(path.read_text().splitlines()) == 3
    assert [r.attempt for r in run(way, square, [2, 2], path)] == [1, 1]


def test_expressions_that_are_alike_are_told_apart_by_name(
    scripted: MakeBackend, path: Path
) -> None:
    a, b = ub.gen(schema=int), ub.gen(schema=int)

    @ub.function
    def program(s: ub.State, x: int) -> None:
        s += f"{x}" + a + b

    scripted(lambda call: "1")
    (live,) = program.run_batch([1], results_file=path)
    assert (live[a], live[b]) == (1, 1)
    (back,) = program.run_batch([1], results_file=path)
    with pytest.raises(ub.ProgramError, match="2 expressions are like it: give each a name"):
        back[a]
