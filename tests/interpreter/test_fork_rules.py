"""Rules 7 and 8: branches are isolated, and joins keep order, length and errors."""

from __future__ import annotations

from typing import Any

import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend
from umbel.interpreter.backends.scripted_replies import Reply, ScriptedCall
from umbel.lang.results import Timings

from .conftest import MakeBackend

DOWN = ub.BackendError("down", backend="scripted")


def by_branch(**replies: Any) -> Any:
    """Return a script that answers by branch: `b0=...` for branch 0."""

    def answer(call: ScriptedCall) -> Any:
        index = call.address.split("[")[1].split("]")[0]
        return replies[f"b{index}"]

    return answer


def test_case_9_an_empty_prompt_can_be_forked(scripted: MakeBackend) -> None:
    scripted(by_branch(b0="a", b1="b", b2="c"))

    @ub.function
    def program(s: ub.State) -> Any:
        forks = s.fork(3)
        forks += ub.gen("v")
        return forks.join()["v"], [f.text() for f in forks]

    assert program.run().value == (["a", "b", "c"], ["a", "b", "c"])


@pytest.mark.parametrize("n", [0, -1])
def test_case_16_a_fork_has_a_branch(scripted: MakeBackend, n: int) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        s.fork(n)

    with pytest.raises(ValueError, match="at least 1 branch"):
        program.run()


def test_rule_1_a_fork_takes_a_whole_number(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        for wrong in ("2", 2.0, True):
            with pytest.raises(TypeError, match="whole number"):
                s.fork(wrong)  # type: ignore[arg-type]

    program.run()


def test_case_10_all_raises_and_names_the_branch(scripted: MakeBackend) -> None:
    scripted(by_branch(b0="a", b1=Reply(error=DOWN), b2="c"))

    @ub.function
    def program(s: ub.State) -> Any:
        forks = s.fork(3)
        forks += ub.gen("v")
        joined = forks.join()
        with pytest.raises(ub.GenerationError, match=r"branch 1 failed: 0.fork0\[1\].0") as caught:
            joined["v"]
        assert isinstance(caught.value.__cause__, ub.BackendError)
        with pytest.raises(ub.GenerationError, match="branch 1 failed"):
            s += "more"
        return forks[0]["v"]

    assert program.run().value == "a"


def test_case_10_collect_puts_errors_in_place(scripted: MakeBackend) -> None:
    scripted(by_branch(b0="a", b1=Reply(error=DOWN), b2="c"))

    @ub.function
    def program(s: ub.State) -> None:
        forks = s.fork(3)
        forks += ub.gen("v")
        joined = forks.join("collect")
        for entries in (joined["v"], list(joined), joined.errors, joined.texts()):
            assert len(entries) == 3
            assert isinstance(entries[1], ub.GenerationError)
            assert isinstance(entries[1].__cause__, ub.BackendError)
        assert [joined["v"][0], joined["v"][2]] == ["a", "c"]
        assert [joined[0].text(), joined[2]["v"]] == ["a", "c"]
        assert [joined.errors[0], joined.errors[2]] == [None, None]
        s += "goes on"

    assert program.run().text() == "goes on"


def test_case_11_a_branch_without_the_name_has_a_marker(scripted: MakeBackend) -> None:
    scripted(by_branch(b0="a", b2="c"))

    @ub.function
    def program(s: ub.State) -> Any:
        forks = s.fork(3)
        forks[0] += ub.gen("v")
        forks[2] += ub.gen("v")
        return forks.join()["v"]

    values = program.run().value
    assert values == ["a", ub.MISSING, "c"]
    assert repr(values[1]) == "MISSING"
    assert not values[1]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_case_12_append_mode_is_in_branch_order_whoever_ends_first(
    scripted: MakeBackend, first: int
) -> None:
    delays = [0.04, 0.04, 0.04]
    delays[first] = 0.0
    replies = {f"b{i}": Reply(text="abc"[i], latency=delays[i]) for i in range(3)}
    scripted(by_branch(**replies))

    @ub.function
    def program(s: ub.State) -> None:
        s += "P"
        forks = s.fork(3)
        forks += ub.gen("v")
        forks.join(mode="append")
        s += "!"

    assert program.run().text() == "Pabc!"


def test_case_13_after_a_join_branches_are_read_only(scripted: MakeBackend) -> None:
    scripted({"v": "x"})

    @ub.function
    def program(s: ub.State) -> None:
        forks = s.fork(2)
        forks += ub.gen("v")
        forks.join()
        for append in (
            lambda: forks[0].__iadd__("more"),
            lambda: forks.__iadd__("more"),
            lambda: forks[0].fork(2),
            lambda: forks[1].copy(),
        ):
            with pytest.raises(ub.ProgramError, match="the branch was joined"):
                append()
        with pytest.raises(ub.ProgramError, match="joined already"):
            forks.join()
        assert forks[1]["v"] == "x"

    program.run()


def test_case_15_gens_and_forks_overlap_and_lazy_reads_do_not_serialise(
    scripted: MakeBackend,
) -> None:
    backend = scripted(latency=0.01)

    @ub.function
    def program(s: ub.State) -> list[Timings]:
        s += ub.gen("a") + ub.gen("b")
        forks = s.fork(8)
        for branch in forks:
            branch += ub.gen("c")
            branch += "again " + branch.var("c")
        forks.join()
        return [branch.meta("c").timings for branch in forks]

    timings = program.run().value
    assert backend.num_pieces == 1
    assert max(one.ready for one in timings) < min(one.finished for one in timings)


def test_a_name_that_a_branch_wrote_is_told_where_only_the_parent_asks(
    scripted: MakeBackend,
) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        left, right = s.fork(2)
        left += ub.gen("b")
        with pytest.raises(ub.UnknownNameError) as from_beside:
            right["b"]
        assert "branch" not in str(from_beside.value)

    result = program.run()
    with pytest.raises(ub.UnknownNameError, match=r"at 0\.fork0\[0\]\.0: read the branch"):
        result["b"]


def test_rule_7_branches_see_their_parents_names_and_nothing_of_each_other(
    scripted: MakeBackend,
) -> None:
    scripted({"a": "1", "b": "2"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("a")
        left, right = s.fork(2)
        left += ub.gen("b")
        assert left["a"] == right["a"] == "1"
        assert left["b"] == "2"
        for other in (right, s):
            with pytest.raises(ub.UnknownNameError, match="nothing is named 'b' here"):
                other["b"]
        assert left.meta("a").address == "0"

    program.run()


def test_rule_7_mutable_values_are_not_shared(scripted: MakeBackend) -> None:
    scripted({"items": "[1]"})

    @ub.function
    def program(s: ub.State) -> None:
        s += ub.gen("items", schema=list[int])
        s["items"].append(2)
        left, right = s.fork(2)
        left["items"].append(3)
        assert s["items"] == [1, 2]
        assert left["items"] == [1, 3]
        assert right["items"] == [1]

    program.run()


def test_rule_7_forks_nest_and_addresses_say_where(scripted: MakeBackend) -> None:
    backend = scripted(lambda call: call.address)

    @ub.function
    def program(s: ub.State) -> Any:
        s += "root"
        outer = s.fork(2)
        inner = outer[1].fork(2)
        inner += "x" + ub.gen("v")
        second = outer[1].fork(1)
        second += ub.gen("v")
        outer[1] += ub.gen("v")
        return [inner[0]["v"], inner[1]["v"], second[0]["v"], outer[1]["v"]]

    assert program.run().value == [
        "1.fork0[1].0.fork0[0].1",
        "1.fork0[1].0.fork0[1].1",
        "1.fork0[1].0.fork1[0].0",
        "1.fork0[1].0",
    ]
    assert backend.num_pieces == 1


def test_rule_6_appending_in_pieces_moves_no_later_address(scripted: MakeBackend) -> None:
    scripted(lambda call: call.address)

    @ub.function
    def whole(s: ub.State) -> None:
        s += ub.user("ab") + ub.gen("v")

    @ub.function
    def pieces(s: ub.State) -> None:
        with s.user():
            s += "a"
            s += "b"
        s += ub.gen("v")

    assert whole.run()["v"] == pieces.run()["v"]
    assert whole.run().messages == pieces.run().messages
    graph = pieces.compile()
    assert len({node.address for node in graph.nodes}) == len(graph.nodes)


def test_rule_8_any_goes_on_with_the_first_and_cancels_the_rest(scripted: MakeBackend) -> None:
    scripted(by_branch(b0=Reply(stalls=True), b1="won", b2=Reply(stalls=True)))

    @ub.function
    def program(s: ub.State) -> Any:
        forks = s.fork(3)
        forks += ub.gen("v")
        joined = forks.join("any")
        s += "after"
        s.text()
        return joined["v"]

    lost, won, also_lost = program.run().value
    assert won == "won"
    for error in (lost, also_lost):
        assert isinstance(error, ub.GenerationError)
        assert isinstance(error.__cause__, ub.CancelledError)


def test_rule_8_any_fails_when_too_few_can_finish(scripted: MakeBackend) -> None:
    scripted(by_branch(b0="a", b1=Reply(error=DOWN), b2=Reply(error=DOWN)))

    @ub.function
    def program(s: ub.State) -> None:
        forks = s.fork(3)
        forks += ub.gen("v")
        forks.join("any", k=2)

    with pytest.raises(ub.GenerationError, match="failed: BackendError: down"):
        program.run()


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"policy": "some"}, "policy must be"),
        ({"mode": "mix"}, "mode must be"),
        ({"k": 1}, "k belongs to policy 'any'"),
        ({"policy": "any", "k": 0}, "k must be from 1 to 2"),
        ({"policy": "any", "k": 3}, "k must be from 1 to 2"),
    ],
)
def test_rule_8_a_join_without_meaning_is_refused(
    scripted: MakeBackend, kwargs: dict[str, Any], says: str
) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        s.fork(2).join(**kwargs)

    with pytest.raises(ValueError, match=says):
        program.run()


def test_rule_8_append_mode_takes_text_only(scripted: MakeBackend) -> None:
    scripted()

    @ub.function
    def program(s: ub.State) -> None:
        forks = s.fork(2)
        forks[1] += ub.user("turn")
        with pytest.raises(ub.ProgramError, match="branch 1 opened a turn"):
            forks.join(mode="append")
        forks.join()

    program.run()


def test_a_with_block_joins(scripted: MakeBackend) -> None:
    scripted({"v": "x"})

    @ub.function
    def program(s: ub.State) -> None:
        with s.fork(2) as forks:
            forks += ub.gen("v")
        with pytest.raises(ub.ProgramError, match="the branch was joined"):
            forks[0] += "more"
        with s.fork(2) as forks:
            joined = forks.join("collect")
        assert joined["v"] == [ub.MISSING, ub.MISSING]

    program.run()


def test_a_copy_goes_its_own_way(scripted: MakeBackend) -> None:
    scripted({"a": "1", "b": "2"})

    @ub.function
    def program(s: ub.State) -> str:
        s += "x" + ub.gen("a")
        other = s.copy()
        other += "y" + ub.gen("b")
        s += "z"
        return other.text()

    result = program.run()
    assert (result.value, result.text()) == ("x1y2", "x1z")


def test_branches_and_joins_of_a_static_tree_are_one_submission(scripted: MakeBackend) -> None:
    backend = scripted()

    def grow(s: ub.State, depth: int) -> None:
        s += ub.gen("thought")
        if depth:
            with s.fork(2) as branches:
                for branch in branches:
                    grow(branch, depth - 1)

    @ub.function
    def tree(s: ub.State) -> None:
        grow(s, 4)

    tree.run()
    assert backend.num_pieces == 1
    graph = tree.compile()
    ops = [type(node.op).__name__ for node in graph.nodes]
    assert (ops.count("Gen"), ops.count("Join"), ops.count("Branch")) == (31, 15, 30)


def test_branches_that_are_not_there_and_names_read_from_a_fork_are_told_what_to_read() -> None:
    @ub.function
    def wrong(s: ub.State, key: Any) -> object:
        return s.fork(2)[key]

    with ScriptedBackend() as backend:
        program = wrong.options(backend=backend)
        with pytest.raises(TypeError, match=r"joined = forks.join\(\)"):
            program.run("note")
        for key in (2, -3):
            with pytest.raises(IndexError, match=f"has 2 branches, so none of index {key}"):
                program.run(key)


def test_an_any_join_that_can_finish_no_more_says_how_many_it_wanted(
    scripted: MakeBackend,
) -> None:
    scripted(by_branch(b0="a", b1=Reply(error=DOWN), b2=Reply(error=DOWN)))

    @ub.function
    def program(s: ub.State) -> Any:
        forks = s.fork(3)
        forks += ub.gen("v")
        return forks.join("any", k=2)["v"]

    with pytest.raises(
        ub.GenerationError,
        match=r"2 of 3 branches had to finish, and too many failed; branch 1 failed: 0.fork0\[1\]",
    ):
        program.run()
