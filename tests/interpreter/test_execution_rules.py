"""Rules 1 to 3: validation on the line, reads as futures, failures, time limits."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import pytest

import umbel as ub
from umbel.interpreter.backends.base import Capabilities
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply
from umbel.lang.results import Thinking

from .conftest import MakeBackend

DOWN = ub.BackendError("the model is down", backend="scripted", retryable=True)


def test_rule_1_an_error_points_to_the_users_line(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        s += "fine"
        s += 3  # type: ignore[arg-type]  # THE LINE

    with pytest.raises(TypeError, match="not int: 3") as caught:
        program.run()
    lines = [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any("THE LINE" in line for line in lines)


@pytest.mark.parametrize("item", [3, None, print, [], b"bytes"])
def test_case_3_what_is_no_text_is_refused(scripted: MakeBackend, item: Any) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        s += item

    with pytest.raises(TypeError, match="takes strings and expressions"):
        program.run()


def test_case_6_a_turn_inside_a_turn_names_both_and_the_line(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        with s.user():
            s += ub.assistant("no")

    with pytest.raises(
        ub.ProgramError, match="assistant turn can't open inside the user turn"
    ) as e:
        program.run()
    assert "test_execution_rules.py:" in str(e.value)


def test_rule_1_turns_close_what_was_opened(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def wrong(s: ub.State) -> None:
        s += ub.user_begin()
        s += ub.assistant_end()

    @ub.function
    def nothing_open(s: ub.State) -> None:
        s += ub.user_end()

    with pytest.raises(ub.ProgramError, match="can't be closed here: the open turn is user"):
        wrong.run()
    with pytest.raises(ub.ProgramError, match="no turn is open"):
        nothing_open.run()


def test_rule_1_a_refused_expression_leaves_nothing_behind(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        s += "a"
        with pytest.raises(ub.ProgramError):
            s += "b" + ub.user_begin() + ub.user_begin()
        s += "c"

    assert program.run().text() == "ac"


def test_rule_2_a_read_waits_for_its_cone_only(scripted: MakeBackend) -> None:
    scripted({"quick": "q", "slow": Reply(stalls=True)})

    @ub.function
    def program(s: ub.State) -> str:
        slow, quick = s.fork(2)
        slow += ub.gen("slow")
        quick += ub.gen("quick")
        value: str = quick["quick"]
        slow.cancel()
        return value

    assert program.run().value == "q"


def test_rule_2_var_needs_no_read(scripted: MakeBackend) -> None:
    backend = scripted({"a": "x", "b": lambda call: f"<{call.prompt}>"})

    @ub.function
    def program(s: ub.State) -> None:
        s += "A" + ub.gen("a")
        s += "B" + s.var("a") + s.var("a") + ub.gen("b")

    result = program.run()
    assert result.text() == "AxBxx<AxBxx>"
    assert backend.num_pieces == 1


def test_rule_2_a_reference_is_not_its_value(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        reference = s.var("a")
        for use in (bool, str, lambda r: f"{r}", lambda r: r == "a", lambda r: r in ("a", "b")):
            with pytest.raises(ub.ProgramError):
                use(reference)
        assert repr(reference) == "var('a')"

    program.run()


def test_references_of_another_run_are_refused(scripted: MakeBackend) -> None:
    scripted()
    kept = []

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        kept.append(s.var("a"))
        s += kept[0]

    program.run()
    with pytest.raises(ub.ProgramError, match="belongs to another run"):
        program.run()


def test_case_1_a_read_raises_the_backends_error_as_its_cause(scripted: MakeBackend) -> None:
    scripted({"a": Reply(error=DOWN)})

    @ub.function
    def program(s: ub.State) -> str:
        s += "text" + ub.gen("a")
        return str(s["a"])

    with pytest.raises(ub.GenerationError, match=r"'a' \(1\) failed: BackendError: .* down") as e:
        program.run()
    assert e.value.address == "1"
    assert isinstance(e.value.__cause__, ub.BackendError)
    assert e.value.__cause__.retryable


@pytest.mark.parametrize("reads_first", [True, False])
def test_case_2_after_a_failure_nothing_hangs(scripted: MakeBackend, reads_first: bool) -> None:
    scripted({"a": Reply(error=DOWN), "b": "fine"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        if reads_first:
            with pytest.raises(ub.GenerationError):
                s["a"]
            with pytest.raises(ub.GenerationError) as at_once:
                s += ub.gen("b")
            assert at_once.value.address == "0"
        else:
            s += ub.gen("b")
            with pytest.raises(ub.GenerationError) as later:
                s["b"]
            assert later.value.address == "0"
            assert isinstance(later.value.__cause__, ub.BackendError)

    program.run()


def test_rule_3_an_append_to_a_poisoned_state_raises_before_it_is_handed_over(
    scripted: MakeBackend,
) -> None:
    scripted({"a": Reply(error=DOWN), "b": "fine"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        other = s.fork(2)
        other[0] += "recorded before the failure is known"
        with pytest.raises(ub.GenerationError):
            s["a"]
        with pytest.raises(ub.GenerationError) as caught:
            other[0] += "more"
        assert caught.value.address == "0"

    program.run()


def test_rule_3_a_failure_poisons_what_depends_on_it_and_nothing_else(
    scripted: MakeBackend,
) -> None:
    scripted({"bad": Reply(error=DOWN), "good": "g"})

    @ub.function
    def program(s: ub.State) -> str:
        left, right = s.fork(2)
        left += ub.gen("bad")
        right += ub.gen("good")
        user = s.copy()
        user += "see " + left.var("bad")
        with pytest.raises(ub.GenerationError) as caught:
            user.text()
        assert caught.value.address == left_address
        return str(right["good"])

    left_address = "0.fork0[0].0"
    assert program.run().value == "g"


def test_rule_3_a_run_raises_a_failure_that_nobody_read(scripted: MakeBackend) -> None:
    scripted({"a": Reply(error=DOWN)})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")

    with pytest.raises(ub.GenerationError, match="the model is down"):
        program.run()


def test_rule_3_a_failure_that_the_body_dealt_with_is_no_error_of_the_run(
    scripted: MakeBackend,
) -> None:
    scripted({"a": Reply(error=DOWN)})

    @ub.function
    def program(s: ub.State) -> str:
        s += ub.gen("a")
        try:
            return str(s["a"])
        except ub.GenerationError:
            return "fallback"

    result = program.run()
    assert (result.value, result.error) == ("fallback", None)
    with pytest.raises(ub.GenerationError):
        result.text()


def test_rule_3_a_gens_timeout_ends_it(scripted: MakeBackend) -> None:
    scripted({"a": Reply(stalls=True)})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a", timeout=0.05)
        s["a"]

    with pytest.raises(ub.GenerationError, match=r"timeout of 0\.05 s") as caught:
        program.run()
    assert isinstance(caught.value.__cause__, TimeoutError)
    assert str(caught.value.__cause__).startswith("'a' (0): ")


@pytest.mark.parametrize("reads", [True, False])
def test_rule_3_a_runs_timeout_ends_it(scripted: MakeBackend, reads: bool) -> None:
    scripted({"a": Reply(stalls=True)})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        if reads:
            s["a"]

    with pytest.raises(ub.GenerationError, match=r"timeout of 0\.05 s") as caught:
        program.options(timeout=0.05).run()
    assert isinstance(caught.value.__cause__, ub.NodeTimeoutError)
    assert str(caught.value.__cause__).startswith("'a' (0): ")


def test_rule_3_cancel_ends_waits_at_once(scripted: MakeBackend) -> None:
    scripted({"a": Reply(stalls=True), "b": "b"})

    @ub.function
    def program(s: ub.State) -> None:
        branch = s.copy()
        branch += ub.gen("a")
        branch.cancel()
        with pytest.raises(ub.GenerationError) as caught:
            branch["a"]
        assert isinstance(caught.value.__cause__, ub.CancelledError)
        with pytest.raises(ub.ProgramError, match="the state was cancelled"):
            branch += "more"
        s += ub.gen("b")

    assert program.run().text() == "b"


def test_rule_3_a_closing_backend_ends_waits(scripted: MakeBackend) -> None:
    backend = scripted({"a": Reply(stalls=True)})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        threading.Timer(0.05, backend.close).start()
        s["a"]

    with pytest.raises(ub.GenerationError, match="the backend was closed"):
        program.run()
    with pytest.raises(ub.GenerationError, match="the scripted backend is closed"):
        program.run()


def test_rule_3_a_backend_that_refuses_a_graph_fails_its_nodes(scripted: MakeBackend) -> None:
    backend = scripted()

    class Broken(ScriptedBackend):
        def open(self, *_: Any) -> Any:
            raise RuntimeError("no room")

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        s["a"]

    with Broken() as broken, pytest.raises(ub.GenerationError, match="RuntimeError: no room"):
        program.options(backend=broken).run()
    assert backend.num_runs == 0


def test_rule_3_a_body_that_raises_ends_its_run(scripted: MakeBackend) -> None:
    scripted({"a": Reply(stalls=True)})
    states = []

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        states.append(s)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        program.run()
    with pytest.raises(ub.GenerationError, match="KeyError"):
        states[0]["a"]
    with pytest.raises(ub.ProgramError):
        states[0] += "more"


def test_rule_10b_a_block_of_thoughts_outside_an_assistant_s_turn_is_refused_on_its_line() -> None:
    thoughtful = ub.gen("x", thinking=True)

    @ub.function
    def program(s: ub.State) -> None:
        with pytest.raises(ub.ProgramError, match="outside of turns"):
            s += thoughtful
        with pytest.raises(ub.ProgramError, match="in a user turn"):
            s += ub.user("Hi" + thoughtful)
        with s.user(), pytest.raises(ub.ProgramError, match="in a user turn"):
            s += thoughtful
        s += ub.assistant(thoughtful)

    with ScriptedBackend({"x": Reply(text="So.", thinking="Let me see")}) as backend:
        result = program.options(backend=backend).run()
    assert result.text() == "So."
    assert result.meta("x").thinking == Thinking("Let me see", 4)
    with (
        ScriptedBackend(capabilities=Capabilities()) as backend,
        pytest.raises(ub.UnsupportedFeatureError, match="thinking"),
    ):
        program.options(backend=backend).run()


def test_a_program_refuses_what_its_backend_can_not_do() -> None:
    poor = Capabilities(roles=False, n_samples=False, join_append=False)
    wants: list[tuple[Any, str]] = [
        (ub.gen(regex="a"), "regex"),
        (ub.gen(schema={}), "schema"),
        (ub.gen(grammar='start: "A"'), "grammar"),
        (ub.gen(choices=["a", "b"]), "choices"),
        (ub.gen(n=2), "n > 1"),
        (ub.gen(heal=True), "heal"),
        (ub.gen(logprobs=True), "logprobs"),
        (ub.gen(prompt_logprobs=True), "prompt_logprobs"),
        (ub.gen(seed=1), "seed"),
        (ub.gen(stop_regex="a"), "stop_regex"),
        (ub.select("x", ["a", "b"]), "select by token_length_normalized"),
        (ub.user("x"), "a user turn"),
    ]

    @ub.function
    def program(s: ub.State) -> None:
        for item, feature in wants:
            with pytest.raises(ub.UnsupportedFeatureError) as caught:
                s += item
            assert caught.value.feature == feature
        with pytest.raises(ub.UnsupportedFeatureError, match="join that appends"):
            s.fork(2).join(mode="append")
        s += ub.select("only", ["one"])

    with ScriptedBackend(capabilities=poor) as backend:
        assert program.options(backend=backend).run().text() == "one"
