"""The token tree of a select: every choice scored in one forward over shared prefixes.

Works on token ids alone; knows no text, no scoring method and no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from umbel.lang.errors import EngineError

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChoiceTree:
    """A row of tokens, the scored context followed by a trie of what the choices add to it.

    Tree rows come in depth-first order, parents before children. Rows are indices into
    `token_ids`, as in `Request`. Where the context is empty the roots have no distribution: their
    log-probability counts as 0, and their parent is -1.
    """

    token_ids: tuple[int, ...]
    num_context: int
    parents: tuple[int, ...]  # [num_tree] parent row of each tree row, num_context - 1 for a root
    paths: tuple[tuple[int, ...], ...]  # per choice: its rows after the context, never empty

    @staticmethod
    def build(run_encodings: Sequence[Sequence[int]], prefix: Sequence[int] = ()) -> ChoiceTree:
        """Make the tree from the encoding of (literal run + choice + terminator) for every choice.

        `prefix` is what stands before the run in the row, such as generated ids. The scored context
        is `prefix` and the longest common prefix of the encodings, shortened until every choice has
        a token after it. Costs one step per token after the context; equal encodings share rows.
        """
        assert run_encodings, "a select without choices has no tree"
        assert all(run_encodings), "every choice needs a token to score"
        common = min(_common_prefix_len(run_encodings), min(map(len, run_encodings)) - 1)
        context = [*prefix, *run_encodings[0][:common]]
        num_context = len(context)
        token_ids, parents = list(context), []
        children: dict[tuple[int, int], int] = {}  # (parent row, token) -> row
        paths: list[tuple[int, ...]] = [()] * len(run_encodings)
        # in sorted order a new row always extends the branch that was added last, so rows come out
        # depth-first
        rest = [tuple(encoding[common:]) for encoding in run_encodings]
        for choice in sorted(range(len(rest)), key=rest.__getitem__):
            row = num_context - 1
            path = []
            for token_id in rest[choice]:
                child = children.get((row, token_id))
                if child is None:
                    child = children[row, token_id] = len(token_ids)
                    token_ids.append(token_id)
                    parents.append(row)
                row = child
                path.append(row)
            paths[choice] = tuple(path)
        return ChoiceTree(tuple(token_ids), num_context, tuple(parents), tuple(paths))

    def unconditional(self, bos_id: int | None) -> ChoiceTree:
        """Return the same tree after nothing but BOS (nothing at all if there is none).

        Every token of every choice keeps its place, so the two trees' log-probabilities align.
        """
        context = () if bos_id is None else (bos_id,)
        shift = len(context) - self.num_context
        return ChoiceTree(
            context + self.token_ids[self.num_context :],
            len(context),
            tuple(parent + shift for parent in self.parents),
            tuple(tuple(row + shift for row in path) for path in self.paths),
        )

    @property
    def num_tree(self) -> int:
        """Tree rows."""
        return len(self.parents)

    @property
    def logits_rows(self) -> list[int]:
        """Rows whose logits are needed, ascending: those with children in the tree."""
        return sorted({row for row in self.parents if row >= 0})

    def choice_token_ids(self, choice: int) -> tuple[int, ...]:
        """Return the scored tokens of a choice."""
        return tuple(self.token_ids[row] for row in self.paths[choice])

    def winner_rows(self, choice: int) -> tuple[int, ...]:
        """Return the tree rows of a choice, in row order: their KV follows the context's."""
        return self.paths[choice]

    def scores(self, row_logprobs: Sequence[float] | Float64Array) -> list[tuple[float, ...]]:
        """Return each choice's token log-probabilities, given those of the tree rows in order."""
        values = np.asarray(row_logprobs, np.float64).tolist()
        assert len(values) == self.num_tree, "one log-probability per tree row"
        return [tuple(values[row - self.num_context] for row in path) for path in self.paths]


class ScoredRows(NamedTuple):
    """Rows whose logits score tokens of a tree: row rows[at[i]] scores token_ids[i]."""

    rows: tuple[int, ...]
    tree_rows: IntArray  # [num_scored] which of the tree's rows, counted after the context
    token_ids: IntArray  # [num_scored]
    at: IntArray  # [num_scored]


class ChoiceScorer:
    """Gathers a tree's log-probabilities, which may arrive in several parts."""

    def __init__(self, tree: ChoiceTree) -> None:
        self.tree = tree
        self._parents = np.asarray(tree.parents, np.int64)
        self._tokens = np.asarray(tree.token_ids[tree.num_context :], np.int64)
        self._logprobs = np.full(tree.num_tree, np.nan)
        self._logprobs[self._parents < 0] = 0.0
        self._missing = set(tree.logits_rows)

    def scored_by(self, rows: Sequence[int]) -> ScoredRows:
        """Return what the logits of some rows of the tree's token row score."""
        index = np.full(len(self.tree.token_ids), -1, np.int64)
        index[np.asarray(rows, np.int64)] = np.arange(len(rows))
        at = np.where(self._parents >= 0, index[self._parents], -1)
        found = np.flatnonzero(at >= 0)
        return ScoredRows(tuple(rows), found, self._tokens[found], at[found])

    def take(self, scored: ScoredRows, logprobs: Float64Array) -> None:
        """Take log-probabilities, one for each token that `scored` names.

        Raises EngineError if the model gave a row that is no distribution.
        """
        found = scored.tree_rows
        if np.isnan(logprobs).any():
            row = int(self._parents[found[np.isnan(logprobs)][0]])
            raise EngineError(
                f"the logits after token {row} of the select are not a distribution, so its "
                "choices can't be scored: look at the weights and at the number type for overflow"
            )
        self._logprobs[found] = logprobs
        self._missing.difference_update(scored.rows)

    @property
    def is_complete(self) -> bool:
        """Whether every needed row has been added."""
        return not self._missing

    def scores(self) -> list[tuple[float, ...]]:
        """Return each choice's token log-probabilities, after the scored context."""
        assert self.is_complete, f"no logits yet for rows {sorted(self._missing)}"
        return self.tree.scores(self._logprobs)


def _common_prefix_len(sequences: Sequence[Sequence[int]]) -> int:
    first, common = sequences[0], len(sequences[0])
    for other in sequences[1:]:
        if other[:common] != first[:common]:  # whole slices first: runs are long, choices many
            common = next(
                (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
                min(common, len(other)),
            )
    return common
