from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.hash_runner import HashRunner

from umbel.lang.errors import EngineError
from umbel.runtime.model_runner.inputs import build_inputs
from umbel.runtime.request import Request
from umbel.runtime.sampling.choice_tree import ChoiceTree
from umbel.runtime.scheduler.batch import Batch, ScheduledRequest

encodings = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8)
prompts = st.lists(st.integers(0, 63), min_size=1, max_size=4)


def score(tree: ChoiceTree, runner: HashRunner, cut: int) -> list[tuple[float, ...]]:
    """Run the tree's row in two chunks and gather what each of them says."""
    request = Request(0, 0, 0, list(tree.token_ids), limit=len(tree.token_ids))
    request.tree_parents, request.num_context = list(tree.parents), tree.num_context
    request.slots = list(range(len(tree.token_ids)))
    logprobs: dict[int, float] = {}
    cut %= len(tree.token_ids)
    for start, end in [(0, cut), (cut, len(tree.token_ids))]:
        if start < end:
            rows = [row for row in tree.logits_rows if start <= row < end]
            batch = Batch((ScheduledRequest(request, start, end),), 0)
            logits = runner.forward(build_inputs(batch, [row - start for row in rows]))
            logprobs |= tree.child_logprobs(rows, logits)
    assert sorted(logprobs) == list(range(tree.num_context, len(tree.token_ids)))
    return tree.scores(logprobs)


def naive_logprobs(runner: HashRunner, context: list[int], tokens: list[int]) -> list[float]:
    """Score one choice token by token."""
    values = []
    for i, token in enumerate(tokens):
        logits = torch.from_numpy(runner.logits_of(context + tokens[:i])).double()
        values.append(float(torch.log_softmax(logits, -1)[token]))
    return values


@given(prompts, encodings, st.integers(0, 30), st.booleans())
def test_one_tree_scores_as_choice_by_choice(
    prompt: list[int], choices: list[list[int]], cut: int, after_prompt: bool
) -> None:
    runner = HashRunner()
    rows = [prompt + choice for choice in choices]
    tree = ChoiceTree.build(rows, len(prompt) if after_prompt else None)
    assert tree.num_context >= len(prompt)
    assert not after_prompt or tree.num_context == len(prompt)
    context = list(tree.token_ids[: tree.num_context])
    scores = score(tree, runner, cut)
    for row, tokens, logprobs in zip(rows, tree.choice_token_ids, scores, strict=True):
        assert context + list(tokens) == row
        np.testing.assert_allclose(
            logprobs, naive_logprobs(runner, context, list(tokens)), atol=1e-5
        )


@given(prompts, encodings)
def test_the_context_is_the_longest_that_leaves_every_choice_a_token(
    prompt: list[int], choices: list[list[int]]
) -> None:
    rows = [prompt + choice for choice in choices]
    tree = ChoiceTree.build(rows)
    num = tree.num_context
    assert {tuple(row[:num]) for row in rows} == {tree.token_ids[:num]}
    longer = {tuple(row[: num + 1]) for row in rows}
    assert len(longer) > 1 or min(map(len, rows)) == num + 1


@given(encodings)
def test_rows_are_the_trie_in_depth_first_order(choices: list[list[int]]) -> None:
    tree = ChoiceTree.build([[9, *choice] for choice in choices])
    rest = set(tree.choice_token_ids)
    prefixes = {path[:i] for path in rest for i in range(1, len(path) + 1)}
    words: list[tuple[int, ...]] = []
    for row in range(tree.num_context, len(tree.token_ids)):
        parent = tree.parents[row - tree.num_context]
        above = () if parent < tree.num_context else words[parent - tree.num_context]
        words.append((*above, tree.token_ids[row]))
    assert words == sorted(prefixes)  # no node twice, none that no choice needs
    for path, tokens in zip(tree.paths, tree.choice_token_ids, strict=True):
        assert words[path[-1] - tree.num_context] == tokens


def test_a_prefix_of_another_choice_ends_inside_the_tree() -> None:
    tree = ChoiceTree.build([[9, 1, 2], [9, 1], [9, 1, 2]])
    assert tree.token_ids == (9, 1, 2)
    assert tree.num_context == 1
    assert tree.paths == ((1, 2), (1,), (1, 2))
    assert tree.logits_rows == [0, 1]
    assert tree.winner_rows(1) == (1,)


@pytest.mark.parametrize("num_context", [0, 2])
def test_a_context_that_scores_nothing_is_refused(num_context: int) -> None:
    with pytest.raises(AssertionError, match=r"not within 1\.\.1"):
        ChoiceTree.build([[1, 2], [1, 3]], num_context)


def test_thousands_of_numeric_choices_cost_their_trie() -> None:
    prompt = [5, 6]
    choices = [[*prompt, *map(int, str(number))] for number in range(2002)]
    tree = ChoiceTree.build(choices)
    assert len(tree.parents) == 2002  # each number hangs on the number without its last digit
    assert len(tree.logits_rows) == 1 + 200  # 1 to 200 have longer ones
    runner = HashRunner(vocab_size=16)
    scores = score(tree, runner, 1000)
    for number in [0, 7, 200, 2001, 1999]:
        expected = naive_logprobs(runner, prompt, choices[number][2:])
        np.testing.assert_allclose(scores[number], expected, atol=1e-5)


def test_a_row_that_is_no_distribution_is_an_error() -> None:
    tree = ChoiceTree.build([[1, 2, 3], [1, 4]])
    assert list(tree.child_logprobs([0], torch.zeros(1, 8))) == [1, 3]
    with pytest.raises(EngineError, match="logits after token 1 are no distribution"):
        tree.child_logprobs([0, 1], torch.tensor([[0.0] * 8, [float("nan")] * 8]))
