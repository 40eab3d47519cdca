from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.hash_runner import HashRunner

from umbel.lang.errors import EngineError
from umbel.runtime.model_runner.inputs import build_inputs
from umbel.runtime.request import Request
from umbel.runtime.sampling.choice_tree import ChoiceScorer, ChoiceTree
from umbel.runtime.sampling.sampler import token_logprobs
from umbel.runtime.scheduler.batch import Batch, ScheduledRequest

encodings = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8)
prefixes = st.lists(st.integers(0, 63), max_size=4)


def add(scorer: ChoiceScorer, rows: list[int], logits: torch.Tensor) -> None:
    scored = scorer.scored_by(rows)
    scorer.take(scored, token_logprobs(logits, scored.token_ids.tolist(), scored.at.tolist()))


def score(tree: ChoiceTree, runner: HashRunner, cut: int) -> list[tuple[float, ...]]:
    """Run the tree's row in two chunks and gather what each of them says."""
    request = Request(0, 0, 0, list(tree.token_ids), limit=len(tree.token_ids))
    request.tree_parents, request.num_context = list(tree.parents), tree.num_context
    request.slots = array("q", range(len(tree.token_ids)))
    scorer = ChoiceScorer(tree)
    cut %= len(tree.token_ids)
    for start, end in [(0, cut), (cut, len(tree.token_ids))]:
        rows = [row for row in tree.logits_rows if start <= row < end]
        if start < end:
            batch = Batch((ScheduledRequest(request, start, end),), 0)
            inputs = build_inputs(batch, [row - start for row in rows])
            add(scorer, rows, runner.forward(inputs).all())
        assert scorer.is_complete == all(row < end for row in tree.logits_rows)
    return scorer.scores()


def naive_logprobs(runner: HashRunner, context: list[int], tokens: list[int]) -> list[float]:
    """Score one choice token by token; the first of an empty row counts as 0."""
    values = []
    for i, token in enumerate(tokens):
        before = context + tokens[:i]
        if before:
            logits = torch.from_numpy(runner.logits_of(before)).double()
            values.append(float(torch.log_softmax(logits, -1)[token]))
        else:
            values.append(0.0)
    return values


@given(prefixes, encodings, st.integers(0, 30))
def test_one_tree_scores_as_choice_by_choice(
    prefix: list[int], choices: list[list[int]], cut: int
) -> None:
    runner = HashRunner()
    tree = ChoiceTree.build(choices, prefix)
    context = list(tree.token_ids[: tree.num_context])
    for choice, scores in enumerate(score(tree, runner, cut)):
        tokens = list(tree.choice_token_ids(choice))
        assert context + tokens == prefix + choices[choice]
        np.testing.assert_allclose(scores, naive_logprobs(runner, context, tokens), atol=1e-5)


@given(prefixes, encodings, st.integers(0, 30), st.none() | st.integers(0, 63))
def test_the_unconditional_tree_scores_the_same_tokens_after_bos(
    prefix: list[int], choices: list[list[int]], cut: int, bos_id: int | None
) -> None:
    runner = HashRunner()
    conditional = ChoiceTree.build(choices, prefix)
    tree = conditional.unconditional(bos_id)
    context = [] if bos_id is None else [bos_id]
    for choice, scores in enumerate(score(tree, runner, cut)):
        tokens = list(conditional.choice_token_ids(choice))
        assert list(tree.choice_token_ids(choice)) == tokens
        np.testing.assert_allclose(scores, naive_logprobs(runner, context, tokens), atol=1e-5)


@given(prefixes, encodings)
def test_the_context_is_the_longest_that_leaves_every_choice_a_token(
    prefix: list[int], choices: list[list[int]]
) -> None:
    tree = ChoiceTree.build(choices, prefix)
    num = tree.num_context - len(prefix)
    assert num >= 0
    assert {(*prefix, *choice[:num]) for choice in choices} == {tree.token_ids[: len(prefix) + num]}
    longer = {tuple(choice[: num + 1]) for choice in choices}
    assert len(longer) > 1 or min(map(len, choices)) == num + 1


@given(prefixes, encodings)
def test_rows_are_the_trie_in_depth_first_order(
    prefix: list[int], choices: list[list[int]]
) -> None:
    tree = ChoiceTree.build(choices, prefix)
    scored = [tree.choice_token_ids(i) for i in range(len(choices))]
    words: list[tuple[int, ...]] = []
    for row in range(tree.num_context, len(tree.token_ids)):
        parent = tree.parents[row - tree.num_context]
        above = () if parent < tree.num_context else words[parent - tree.num_context]
        words.append((*above, tree.token_ids[row]))
    # no node twice, and none that no choice needs
    assert words == sorted({tokens[:i] for tokens in scored for i in range(1, len(tokens) + 1)})
    assert tree.num_tree == len(words)
    for choice, tokens in enumerate(scored):
        path = [words[row - tree.num_context] for row in tree.winner_rows(choice)]
        assert path == [tokens[:i] for i in range(1, len(tokens) + 1)]


def test_a_prefix_of_another_choice_ends_inside_the_tree() -> None:
    tree = ChoiceTree.build([[9, 1, 2], [9, 1], [9, 1, 2]])
    assert tree.token_ids == (9, 1, 2)
    assert tree.num_context == 1
    assert tree.paths == ((1, 2), (1,), (1, 2))
    assert tree.logits_rows == [0, 1]


def test_thousands_of_numeric_choices_cost_their_trie() -> None:
    choices = [[5, 6, *map(int, str(number))] for number in range(2002)]
    tree = ChoiceTree.build(choices)
    assert tree.num_tree == 2002  # each number hangs on the number without its last digit
    assert len(tree.logits_rows) == 1 + 200  # 1 to 200 have longer ones
    scores = score(tree, HashRunner(vocab_size=16), 1000)
    for number in [0, 7, 200, 2001, 1999]:
        expected = naive_logprobs(HashRunner(vocab_size=16), [5, 6], choices[number][2:])
        np.testing.assert_allclose(scores[number], expected, atol=1e-5)


def test_a_row_that_is_no_distribution_is_an_error() -> None:
    scorer = ChoiceScorer(ChoiceTree.build([[1, 2, 3], [1, 4]]))
    add(scorer, [0], torch.zeros(1, 8))
    assert not scorer.is_complete
    with pytest.raises(EngineError, match="after token 1 of the select"):
        add(scorer, [1], torch.full((1, 8), float("nan")))
