"""One select: which rows of its tree are gone on with, and how its winner is drawn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbel.lang.ir import Select
from umbel.runtime.request import Request
from umbel.runtime.sampling import ChoiceScorer, ChoiceTree
from umbel.runtime.select_task import SelectTask, TreeScoring

ids = st.lists(st.integers(1, 3), min_size=1, max_size=4)
encodings = st.lists(ids, min_size=2, max_size=5)


def scoring(tree: ChoiceTree, logprobs: list[float] | None = None) -> TreeScoring:
    request = Request(
        request_id=0,
        program_id=0,
        node_id=0,
        token_ids=list(tree.token_ids),
        limit=len(tree.token_ids),
        tree_parents=list(tree.parents),
        num_context=tree.num_context,
    )
    scorer = ChoiceScorer(tree)
    if logprobs is not None:
        scorer._logprobs[:] = logprobs
        scorer._missing.clear()
    return TreeScoring(tree, request, scorer)


@given(ids, encodings, st.sampled_from([[], [9], [8, 9]]))
def test_rule_11_the_winner_s_kept_rows_are_its_row_as_far_as_its_path_spells_it(
    context: list[int], choices: list[list[int]], terminator: list[int]
) -> None:
    rows = [[*context, *choice] for choice in choices]
    tree = ChoiceTree.build([[*row, *terminator] for row in rows])
    task = SelectTask(Select("s", tuple(map(str, range(len(rows))))), rows, scoring(tree))
    for winner, row in enumerate(rows):
        kept = task.kept_rows(winner)
        path = list(tree.paths[winner])
        assert kept == path[: len(kept)]
        own = [tree.token_ids[i] for i in path]
        rest = row[tree.num_context :]
        assert own[: len(kept)] == rest[: len(kept)]
        assert len(kept) == len(rest) or own[len(kept) : len(kept) + 1] != rest[len(kept) :][:1]


def test_rule_11_what_a_terminator_changed_in_the_choice_is_not_kept() -> None:
    tree = ChoiceTree.build([[1, 2, 7], [1, 3, 4, 9]])  # 7 is "x" with its terminator in one token
    task = SelectTask(Select("s", ("x", "y")), [[1, 2, 5], [1, 3, 4]], scoring(tree))
    assert [tree.token_ids[row] for row in task.kept_rows(0)] == [2]
    assert [tree.token_ids[row] for row in task.kept_rows(1)] == [3, 4]


@pytest.mark.parametrize(
    ("temperature", "uniform", "winner"), [(0.0, 0.99, 1), (1.0, 0.0, 0), (1.0, 0.99, 1)]
)
def test_rule_11_temperature_draws_and_0_takes_the_best(
    temperature: float, uniform: float, winner: int
) -> None:
    tree = ChoiceTree.build([[1, 2], [1, 3]])
    select = Select("s", ("x", "y"), temperature=temperature)
    task = SelectTask(select, [[1, 2], [1, 3]], scoring(tree, [-1.5, -0.5]), uniform=uniform)
    found, table = task.decide()
    assert found == winner
    assert [row.sum for row in table] == [-1.5, -0.5]


def test_the_unconditional_method_waits_for_both_trees() -> None:
    tree = ChoiceTree.build([[1, 2, 4], [1, 3, 4]])
    main = scoring(tree, [-1.0, -0.1, -1.0, -0.2])
    plain = scoring(tree.unconditional(9), [-5.0, -0.1, -5.0, -0.9])
    select = Select("s", ("x", "y"), method="unconditional_likelihood_normalized")
    task = SelectTask(select, [[1, 2, 4], [1, 3, 4]], main, plain)
    main.is_done = True
    assert not task.is_done
    plain.is_done = True
    assert task.is_done
    winner, table = task.decide()
    assert winner == 1, "its second token was less likely without the context"
    assert table[1].score == pytest.approx((-1.0 - 0.2) / 2 - (-0.9) / 2)


def test_only_the_main_tree_leaves_rows_and_without_a_winner_its_context() -> None:
    tree = ChoiceTree.build([[1, 2, 4], [1, 3, 4]])
    main, plain = scoring(tree), scoring(tree.unconditional(9))
    select = Select("s", ("x", "y"), method="unconditional_likelihood_normalized")
    task = SelectTask(select, [[1, 2, 4], [1, 3, 4]], main, plain)
    main.request.num_computed = len(tree.token_ids)
    assert task.rows_to_keep(plain, 1) == []
    assert task.rows_to_keep(main, None) == [0]
    assert [tree.token_ids[row] for row in task.rows_to_keep(main, 1)] == [1, 3, 4]


@pytest.mark.parametrize("num_computed", range(6))
def test_rows_that_a_retracted_tree_has_not_computed_again_are_not_kept(num_computed: int) -> None:
    tree = ChoiceTree.build([[1, 2, 4], [1, 3, 4]])
    main = scoring(tree)
    task = SelectTask(Select("s", ("x", "y")), [[1, 2, 4], [1, 3, 4]], main)
    main.request.num_computed = len(tree.token_ids)
    kept = task.rows_to_keep(main, 0)
    main.request.num_computed = num_computed
    assert task.rows_to_keep(main, 0) == [row for row in kept if row < num_computed]
