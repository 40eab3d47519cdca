"""What was recorded comes back: values, failures and logprobs, without the backend."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tests.interpreter.random_programs import (
    Step,
    Writer,
    answer,
    outcome_of,
    programs,
)

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply
from umbel.interpreter.replay import Recorder, ReplayBackend

HEADER = '{"umbel_record":1,"name":"x","capabilities":{}}\n'
NODE = '{"id":0,"address":"0","op":{"type":"text","parts":["a"]}}'
EVENT = '{"type":"started","node":1}'


@ub.function
def advise(s: ub.State, topic: str) -> str:
    s += f"About {topic}: " + ub.gen("idea", max_tokens=8)
    forks = s.fork(2)
    forks += "so " + ub.gen("step", max_tokens=4)
    forks.join()
    s += " is " + ub.select("verdict", ["good", "bad"])
    s += " then " + ub.gen(f"last_{s['verdict']}")
    return s.text()


@ub.function
def _choose(s: ub.State) -> None:
    s += "which? " + ub.select("verdict", ["a", "b"])


@contextmanager
def _recording(path: Path, script: Any = None) -> Iterator[Recorder]:
    with ScriptedBackend(script) as backend, closing(Recorder(backend, path)) as recorder:
        yield recorder


def test_a_run_is_repeated_node_by_node(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    script = {"idea": "sit", "step": ["a", "b"], "verdict": "bad", "last_bad": "go"}
    with _recording(path, script) as recorder:
        recorded = advise.options(backend=recorder).run("tea")
    with closing(ReplayBackend(path)) as replay:
        played = advise.options(backend=replay).run("tea")
        assert played.value == recorded.value
        assert played.names() == recorded.names()
        for name in ("idea", "verdict", "last_bad"):
            assert played.meta(name) == recorded.meta(name)
        assert (replay.name, replay.capabilities) == (recorder.name, recorder.capabilities)


def test_a_replay_streams(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with _recording(path) as recorder:
        whole = "".join(advise.options(backend=recorder).stream("tea"))
    with closing(ReplayBackend(path)) as replay:
        assert "".join(advise.options(backend=replay).stream("tea")) == whole


def test_rows_find_their_own_runs_whatever_their_order(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    topics = [f"topic {i}" for i in range(20)]
    with _recording(
        path,
        lambda call: (
            Reply(text=f"{call.row}{call.name[-3:]}") if call.name != "verdict" else "good"
        ),
    ) as recorder:
        recorded = advise.options(backend=recorder).run_batch(topics, max_in_flight=7)
    with closing(ReplayBackend(path)) as replay:
        played = advise.options(backend=replay).run_batch(topics, max_in_flight=3)
        assert [result.value for result in played] == [result.value for result in recorded]


def test_a_changed_program_is_refused_where_it_changed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with _recording(path) as recorder:
        advise.options(backend=recorder).run("tea")
    with closing(ReplayBackend(path)) as replay:
        with pytest.raises(ub.GenerationError) as failed:
            advise.options(backend=replay).run("coffee")
        assert failed.value.address == "0"  # not that of the node that was read
        assert "the text is 'About coffee: ', and was 'About tea: '" in str(failed.value)


def _ask(change: str) -> ub.Program[..., None]:
    @ub.function
    def ask(s: ub.State) -> None:
        s += "long, and the same for both " * 9 + ("?" if change == "text" else "!")
        s += ub.gen("x", temperature=0.5 if change == "sampling" else 0.0, regex="a|b")
        s += ub.gen("y")
        name = "y" if change == "reference" else "x"
        s += ub.select("z", ["a", "b"]) if change == "kind" else " or " + s.var(name)
        if change == "more":
            s += ub.gen("more")

    return ask


@pytest.mark.parametrize(
    ("change", "address", "said"),
    [
        ("text", "0", "the text is ...'h long, and the same for both ?', and was ...'h long, and "),
        ("sampling", "1", "temperature is '0.5', and was '0.0'"),
        ("reference", "3", "the text is ' or ⟨2⟩', and was ' or ⟨1⟩'"),
        ("kind", "3", "the operation is 'Select', and was 'Text'"),
        ("more", "4", "nothing was recorded there"),
    ],
)
def test_a_node_that_was_not_recorded_says_what_differs(
    change: str, address: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    with _recording(path) as recorder:
        _ask("").options(backend=recorder).run()
    with closing(ReplayBackend(path)) as replay:
        with pytest.raises(ub.GenerationError) as failed:
            _ask(change).options(backend=replay).run()
        cause = failed.value.__cause__
        assert isinstance(cause, ub.BackendError)
        assert f"{address} is not as it was recorded in {path}: {said}" in str(cause)


def test_events_come_back_as_they_came(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    script = {"x": Reply(tokens=("a", "b", "cd")), "y": Reply(tokens=("e", "f"), latency=0.01)}

    @ub.function
    def both(s: ub.State) -> None:
        forks = s.fork(2)
        forks[0] += ub.gen("y")
        forks[1] += ub.gen("x")
        forks.join()

    def events(backend: Any) -> list[tuple[str, str, str]]:
        stream = both.options(backend=backend).stream()
        return [(event.kind, event.address, event.text) for event in stream.events()]

    with _recording(path, script) as recorder:
        recorded = events(recorder)
    assert [text for kind, _, text in recorded if kind == "delta"] == ["a", "b", "cd", "e", "f"]
    with closing(ReplayBackend(path)) as replay:
        assert events(replay) == recorded


@ub.function
def _give_up(s: ub.State, cancels: bool = True) -> str:
    side = s.copy()
    side += ub.gen("slow")
    after = side.fork(1)
    after += " then " + ub.gen("never")
    s += ub.gen("quick") + " and " + ub.gen("last")
    s.text()
    time.sleep(0.05)  # whatever a replay has to say, it has said
    if cancels:
        side.cancel()
        side = s.copy()
    return s.text()


def test_what_a_program_cancels_ends_when_it_cancels_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with _recording(path, {"slow": Reply(stalls=True), "quick": "a", "last": "b"}) as recorder:
        recorded = _give_up.options(backend=recorder, timeout=20).run()
    with closing(ReplayBackend(path, patience=20)) as replay:
        played = _give_up.options(backend=replay, timeout=20).run()
    assert (played.value, played.error) == (recorded.value, recorded.error) == ("a and b", None)


def test_a_program_that_no_longer_cancels_does_not_hang(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    @ub.function
    def wait(s: ub.State, cancels: bool) -> None:
        s += ub.gen("slow")
        s.fork(1).join()
        if cancels:
            s.cancel()
        else:
            s.text()

    with _recording(path, {"slow": Reply(stalls=True)}) as recorder:
        wait.options(backend=recorder, timeout=20).run(True)
    with closing(ReplayBackend(path, patience=0.05)) as replay:
        with pytest.raises(ub.GenerationError) as failed:
            wait.options(backend=replay, timeout=20).run(False)
        assert isinstance(failed.value.__cause__, ub.CancelledError)


def test_a_run_that_was_not_written_to_its_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with _recording(path) as recorder:
        first = advise.options(backend=recorder).run("tea")
        size = path.stat().st_size
        advise.options(backend=recorder).run("milk")
    whole = path.read_bytes()
    path.write_bytes(whole[: (size + len(whole)) // 2])
    with closing(ReplayBackend(path)) as replay:
        assert advise.options(backend=replay).run("tea").value == first.value
        with pytest.raises(ub.GenerationError, match="has 1 run of row 0, and each is played once"):
            advise.options(backend=replay).run("milk")


def test_each_run_is_played_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with _recording(
        path, {"verdict": "good"} | dict.fromkeys(("idea", "step", "last_good"), "x")
    ) as recorder:
        program = advise.options(backend=recorder)
        values = [program.run(topic).value for topic in ("tea", "milk", "tea")]
    with closing(ReplayBackend(path)) as replay:
        program = advise.options(backend=replay)
        assert program.run("milk").value == values[1]
        assert [program.run("tea").value for _ in range(2)] == [values[0], values[2]]
        with pytest.raises(ub.GenerationError):
            program.run("tea")


def test_a_record_holds_no_credentials(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    error = ub.BackendError("refused, api_key=abcdef123456", backend="scripted")
    with _recording(path, {"idea": Reply(error=error)}) as recorder:
        (result,) = advise.options(backend=recorder).run_batch(["tea"], on_error="collect")
    with closing(ReplayBackend(path)) as replay:
        (played,) = advise.options(backend=replay).run_batch(["tea"], on_error="collect")
    assert "api_key=[removed]" in str(played.error)
    assert isinstance(result.error, ub.GenerationError)
    assert "refused" in path.read_text()
    assert "abcdef123456" not in path.read_text()


def test_a_closed_replay_takes_no_runs(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with _recording(path) as recorder:
        advise.options(backend=recorder).run("tea")
    replay = ReplayBackend(path)
    replay.close()
    replay.close()
    with pytest.raises(ub.GenerationError) as failed:
        advise.options(backend=replay).run("tea")
    assert isinstance(failed.value.__cause__, ub.BackendError)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "no json",
        '{"umbel_record":1,"name":"x","capabilities":{}}',  # cut
        '{"umbel_record":2,"name":"x","capabilities":{}}\n',
        f'{HEADER}{{"options":{{}}}}\n',
        f'{HEADER}{{"options":{{}},"nodes":[{NODE}],"cancelled":[],"events":[]}}\n',
        f'{HEADER}{{"options":{{}},"nodes":[{NODE}],"cancelled":[],"events":[{EVENT}]}}\n',
    ],
)
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ub.ProgramError, match=r"run\.jsonl is no record"):
        ReplayBackend(path)


@pytest.mark.parametrize("is_replay", [False, True])
def test_text_that_is_not_unicode_fails_and_does_not_hang(is_replay: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with _recording(path) as recorder:
        advise.options(backend=recorder).run("tea")
        replay = ReplayBackend(path)
        program = advise.options(backend=replay if is_replay else recorder, timeout=20)
        with closing(replay), pytest.raises(ub.GenerationError, match="surrogates"):
            program.run("\ud800")


def test_infinite_logprobs_come_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    reply = Reply(text="a", scores={"a": [0.0], "b": [-math.inf]})
    with _recording(path, {"verdict": reply}) as recorder:
        recorded = _choose.options(backend=recorder).run().meta("verdict")
    assert -math.inf in [score.sum for score in recorded.scores]
    with closing(ReplayBackend(path)) as replay:
        assert _choose.options(backend=replay).run().meta("verdict") == recorded


@settings(max_examples=25, deadline=None)
@given(programs())
def test_any_program_comes_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, steps: tuple[Step, ...]
) -> None:
    path = tmp_path_factory.mktemp("replay") / "run.jsonl"

    def outcome(backend: Any) -> Any:
        writer = Writer(stepwise=False)

        @ub.function
        def program(s: ub.State) -> None:
            writer.write(s, steps)

        (result,) = program.options(backend=backend, seed=1).run_batch([{}], on_error="collect")
        assert result.state is not None
        return outcome_of(result.state, writer)

    with _recording(path, answer) as recorder:
        recorded = outcome(recorder)
    with closing(ReplayBackend(path)) as replay:
        assert outcome(replay) == recorded


def test_a_run_beyond_those_recorded_says_how_many_there_were(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with _recording(path) as recorder:
        _choose.options(backend=recorder).run()
    with closing(ReplayBackend(path)) as replay:
        program = _choose.options(backend=replay)
        program.run()
        with pytest.raises(ub.GenerationError, match="has 1 run of row 0, and each is played once"):
            program.run()
    with _recording(path):
        pass
    with (
        closing(ReplayBackend(path)) as replay,
        pytest.raises(ub.GenerationError, match="has no run of row 0 that ended"),
    ):
        _choose.options(backend=replay).run()
