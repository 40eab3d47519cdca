"""The token tree of a select: every choice scored in one forward over shared prefixes.

Works on token ids alone; knows no text, no scoring method and no KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from umbel.lang.errors import EngineError

from .sampler import token_logprobs


@dataclass(frozen=True, slots=True)
class ChoiceTree:
    """A row of tokens: the scored context, followed by a trie of what the choices add to it.

    Tree rows come in depth-first order, parents before children. Rows are indices into
    `token_ids`, as in `Request`. The context is never empty: something must score a first token.
    """

    token_ids: tuple[int, ...]
    num_context: int
    parents: tuple[int, ...]  # [num_tree] parent row of each tree row; num_context - 1 for a root
    paths: tuple[tuple[int, ...], ...]  # per choice: its rows after the context, never empty

    @staticmethod
    def build(encodings: Sequence[Sequence[int]], num_context: int | None = None) -> ChoiceTree:
        """Make the tree from each choice's whole row: prompt, choice, terminator if it has one.

        The scored context is the rows' longest common prefix, shortened until every choice has a
        token after it; `num_context` sets a shorter one. Costs one step per token after the
        context; choices with equal rows share all of them.
        """
        longest = min(_common_prefix_len(encodings), min(map(len, encodings)) - 1)
        if num_context is None:
            num_context = longest
        assert 1 <= num_context <= longest, f"context {num_context} is not within 1..{longest}"
        token_ids = list(encodings[0][:num_context])
        parents: list[int] = []
        children: dict[tuple[int, int], int] = {}  # (parent row, token) -> row
        paths: list[tuple[int, ...]] = [()] * len(encodings)
        # in sorted order a new row always extends the branch that was added last, so rows come out
        # depth-first
        rest = [tuple(encoding[num_context:]) for encoding in encodings]
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

    @property
    def logits_rows(self) -> list[int]:
        """Rows whose logits are needed, ascending: those that have children in the tree."""
        return sorted(set(self.parents))

    @property
    def choice_token_ids(self) -> list[tuple[int, ...]]:
        """The scored tokens of each choice."""
        return [tuple(self.token_ids[row] for row in path) for path in self.paths]

    def winner_rows(self, choice: int) -> tuple[int, ...]:
        """Return the tree rows of a choice, in row order: their KV follows the context's."""
        return self.paths[choice]

    def child_logprobs(self, rows: Sequence[int], logits: torch.Tensor) -> dict[int, float]:
        """Return the log-probability of each tree row that hangs on one of `rows`.

        `logits` is float32 [len(rows), vocab_size]; a forward may give any part of `logits_rows`.
        Raises EngineError if the model gave a row that is no distribution.
        """
        index = np.full(len(self.token_ids), -1, np.int64)
        index[np.asarray(rows, np.int64)] = np.arange(len(rows))
        at = index[np.asarray(self.parents, np.int64)]
        found = np.flatnonzero(at >= 0)
        children = (found + self.num_context).tolist()
        ids = [self.token_ids[child] for child in children]
        logprobs = token_logprobs(logits, ids, at[found].tolist())
        broken = np.flatnonzero(np.isnan(logprobs))
        if len(broken):
            raise EngineError(
                f"the model's logits after token {self.parents[found[broken[0]]]} are no "
                "distribution, so the choices can't be scored: look at the weights and at the "
                "number type for overflow"
            )
        return dict(zip(children, logprobs.tolist(), strict=True))

    def scores(self, logprobs: Mapping[int, float]) -> list[tuple[float, ...]]:
        """Return each choice's token log-probabilities, given those of all tree rows."""
        return [tuple(logprobs[row] for row in path) for path in self.paths]


def _common_prefix_len(sequences: Sequence[Sequence[int]]) -> int:
    first, common = sequences[0], len(sequences[0])
    for other in sequences[1:]:
        if other[:common] != first[:common]:  # whole slices first: prompts are long, choices many
            common = next(
                (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
                min(common, len(other)),
            )
    return common
