"""Rule 13: chunks concatenate to the value, for any consumer, sync and async; errors come last."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply

from .conftest import MakeBackend

EMOJI = "👩‍🚀"
WAYS = ["sync", "async"]


@ub.function
def two_gens(s: ub.State) -> str:
    s += "start "
    s += ub.gen("a", stop="STOP") + " middle " + ub.gen("b")
    branch = s.copy()
    branch += ub.gen("a")
    return "value"


@ub.function
async def two_gens_async(s: ub.State) -> str:
    s += "start "
    s += ub.gen("a", stop="STOP") + " middle " + ub.gen("b")
    await s.get("b")
    return "value"


def collect(way: str, program: Any, pick: Callable[[Any], Any], pause: float = 0.0) -> list[Any]:
    """Read a stream to its end, slowly if asked to."""
    found = []
    if way == "sync":
        for item in pick(program.stream()):
            found.append(item)
            time.sleep(pause)
        return found

    async def follow() -> None:
        async for item in pick(program.astream()):
            found.append(item)
            await asyncio.sleep(pause)

    asyncio.run(follow())
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [two_gens, two_gens_async])
@pytest.mark.parametrize("pause", [0.0, 0.012])
def test_case_26_chunks_concatenate_for_any_consumer(
    scripted: MakeBackend, way: str, program: Any, pause: float
) -> None:
    scripted(
        {
            "a": Reply(tokens=("one", " two", " thr", "STO", "P!"), token_latency=0.002),
            "b": Reply(tokens=("x", "y", "z"), token_latency=0.002),
        }
    )
    chunks = collect(way, program, lambda stream: stream, pause)
    assert "".join(chunks) == "start one two thr middle xyz"
    assert len(chunks) >= 8
    assert "".join(collect(way, program, lambda stream: stream.text("b"), pause)) == "xyz"
    assert "".join(collect(way, program, lambda stream: stream.text("a"), pause)) == "one two thr"


@pytest.mark.parametrize("way", WAYS)
@given(
    text=st.text(st.characters(codec="utf-8"), max_size=12).map(lambda t: EMOJI + t + "\ufffd"),
    data=st.data(),
)
def test_case_25_characters_are_never_cut(way: str, text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw) - 1), max_size=12)))
    tokens = tuple(raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True))

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("v")

    with ScriptedBackend({"v": Reply(tokens=tokens)}) as backend, ub.use_backend(backend):
        chunks = collect(way, program, lambda stream: stream)
        assert "".join(chunks) == text == program.run()["v"]
        cut = program.options(sampling={"max_tokens": len(tokens)})
        assert cut.run()["v"] == text


def test_case_25_text_that_ends_inside_a_character_ends_before_it(scripted: MakeBackend) -> None:
    scripted({"v": Reply(tokens=("ok", EMOJI.encode()[:2], EMOJI.encode()[2:]))})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("v", max_tokens=2)

    assert program.run()["v"] == "ok"
    assert "".join(program.stream()) == "ok"


def test_rule_13_every_iterator_starts_at_the_beginning(scripted: MakeBackend) -> None:
    scripted({"a": "1", "b": "2"})
    stream = two_gens.stream()
    assert "".join(stream) == "".join(stream) == "start 1 middle 2"
    assert stream.result().value == "value"


@pytest.mark.parametrize("way", WAYS)
def test_rule_13_errors_come_after_the_chunks_before_them(scripted: MakeBackend, way: str) -> None:
    scripted({"a": Reply(tokens=("one", " two"), error=ub.BackendError("down")), "b": "b"})
    for pick in (lambda stream: stream, lambda stream: stream.text("a")):
        found: list[str] = []

        def into(stream: Any, pick: Any = pick, found: list[str] = found) -> Any:
            if way == "sync":
                return _tee(pick(stream), found)
            return _atee(pick(stream), found)

        with pytest.raises(ub.GenerationError, match="down"):
            collect(way, two_gens, into)
        assert "".join(found).removeprefix("start ") == "one two"


def _tee(chunks: Any, found: list[str]) -> Any:
    for chunk in chunks:
        found.append(chunk)
        yield chunk


async def _atee(chunks: Any, found: list[str]) -> Any:
    async for chunk in chunks:
        found.append(chunk)
        yield chunk


@pytest.mark.parametrize("way", WAYS)
def test_events_tell_all_that_happens(scripted: MakeBackend, way: str) -> None:
    scripted({"n": Reply(tokens=("1", "2")), "bad": Reply(error=ub.BackendError("down"))})

    @ub.function
    def program(s: ub.State) -> None:
        s += "text" + ub.gen("n", schema=int)
        branch = s.copy()
        branch += ub.gen("bad")

    events = collect(way, program, lambda stream: stream.events())
    seen = [(e.kind, e.name, e.text, e.value) for e in events]
    assert seen == [
        ("started", "n", "", None),
        ("delta", "n", "1", None),
        ("delta", "n", "2", None),
        ("value", "n", "12", 12),
        ("started", "bad", "", None),
        ("failed", "bad", "", None),
        ("done", "", "", None),
    ]
    assert isinstance(events[-2].error, ub.GenerationError)
    assert events[-1].error is None
    assert [e.address for e in events[:2]] == ["1", "1"]


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_never_comes_is_said(scripted: MakeBackend, way: str) -> None:
    scripted({"a": "1", "b": "2"})
    with pytest.raises(ub.UnknownNameError, match="made nothing named 'c'"):
        collect(way, two_gens, lambda stream: stream.text("c"))
    with pytest.raises(ub.ProgramError, match="has no name to stream by"):
        collect(way, two_gens, lambda stream: stream.text(ub.gen()))


@pytest.mark.parametrize("way", WAYS)
def test_rule_3_a_cancelled_stream_ends(scripted: MakeBackend, way: str) -> None:
    scripted({"a": Reply(tokens=("one",), stalls=True), "b": "2"})
    found: list[str] = []

    def follow(stream: Any) -> Any:
        if way == "sync":
            for chunk in stream:
                found.append(chunk)
                if chunk == "one":
                    stream.cancel()
                yield chunk

    async def afollow(stream: Any) -> Any:
        async for chunk in stream:
            found.append(chunk)
            if chunk == "one":
                stream.cancel()
            yield chunk

    with pytest.raises(ub.GenerationError) as caught:
        collect(way, two_gens, follow if way == "sync" else afollow)
    assert isinstance(caught.value.__cause__, ub.CancelledError)
    assert "".join(found) == "start one"


@pytest.mark.parametrize("way", WAYS)
def test_rule_3_a_streams_timeout_ends_it(scripted: MakeBackend, way: str) -> None:
    scripted({"a": Reply(tokens=("one",), stalls=True), "b": "2"})
    with pytest.raises(ub.GenerationError, match="timeout"):
        collect(way, two_gens.options(timeout=0.1), lambda stream: stream)


@pytest.mark.parametrize("way", WAYS)
def test_a_body_that_raises_ends_its_stream(scripted: MakeBackend, way: str) -> None:
    scripted({"a": "x"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        s["a"]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        collect(way, program, lambda stream: stream)
    events = collect(way, program, lambda stream: stream.events())
    assert isinstance(events[-1].error, KeyError)


def test_case_27_waiting_for_a_stream_blocks_no_loop(scripted: MakeBackend) -> None:
    scripted({"a": Reply(tokens=("late",), latency=0.2), "b": "2"})
    ticks = 0

    async def main() -> str:
        nonlocal ticks

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticker = asyncio.create_task(tick())
        text = "".join([chunk async for chunk in two_gens.astream().text("a")])
        ticker.cancel()
        return text

    assert asyncio.run(main()) == "late"
    assert ticks >= 8


@pytest.mark.parametrize("way", WAYS)
def test_a_json_value_is_streamed_by_what_is_closed_of_it(scripted: MakeBackend, way: str) -> None:
    class Report(BaseModel):
        title: str
        tags: list[str]

    tokens = ('{"title": "a', ' b", ', '"tags": ["x"', ', "y', '"]}')
    scripted({"r": Reply(tokens=tokens), "a": "no"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("r", schema=Report)

    assert collect(way, program, lambda stream: stream.partial("r")) == [
        {},
        {"title": "a b"},
        {"title": "a b", "tags": ["x"]},
        {"title": "a b", "tags": ["x", "y"]},
        Report(title="a b", tags=["x", "y"]),
    ]
    with pytest.raises(ub.UnknownNameError):
        collect(way, program, lambda stream: stream.partial("q"))
