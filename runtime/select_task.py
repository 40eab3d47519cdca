"""One select: its token trees, its log-probabilities as they come in, its winner.

Knows token ids and log-probabilities; nothing of batches, pages or the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from umbel.lang.choice_scoring import draw, score_choices
from umbel.lang.ir import Select
from umbel.lang.results import ChoiceScore

from .request import Request
from .sampling import ChoiceScorer, ChoiceTree


@dataclass(slots=True, eq=False)
class TreeScoring:
    """The scoring of one token tree by one request; log-probabilities arrive step by step."""

    tree: ChoiceTree
    request: Request
    scorer: ChoiceScorer
    is_done: bool = False

    def logits_rows(self, start: int, end: int) -> list[int]:
        """Return the rows in [start, end) whose logits score something."""
        return [row for row in self.tree.logits_rows if start <= row < end]


@dataclass(slots=True, eq=False)
class SelectTask:
    """A running select. `rows[i]` is the whole row with choice i, without a terminator."""

    select: Select
    rows: list[list[int]]
    main: TreeScoring
    unconditional: TreeScoring | None = None
    uniform: float = 0.0  # what `temperature` > 0 draws with

    @property
    def trees(self) -> list[TreeScoring]:
        """The trees to be scored: one, or two for the unconditional method.

        The main one comes last: the winner's rows are kept if it is the last to be scored.
        """
        return [self.main] if self.unconditional is None else [self.unconditional, self.main]

    @property
    def is_done(self) -> bool:
        """Whether every tree is scored."""
        return all(tree.is_done for tree in self.trees)

    def decide(self) -> tuple[int, tuple[ChoiceScore, ...]]:
        """Return the winner's index and the table of scores."""
        select, tree = self.select, self.main.tree
        plain = None if self.unconditional is None else self.unconditional.scorer.scores()
        winner, table = score_choices(
            select.choices,
            [tree.choice_token_ids(i) for i in range(len(select.choices))],
            self.main.scorer.scores(),
            select.method,
            plain,
        )
        if select.temperature > 0:
            winner = draw(table, select.temperature, self.uniform)
        return winner, table

    def rows_to_keep(self, scoring: TreeScoring, winner: int | None) -> list[int]:
        """Return the rows of a tree that is scored to leave in the cache; None: no winner yet.

        Between the pass that scored it and now its request may have been retracted, and some rows
        may not be there again.
        """
        if scoring is not self.main:
            return []
        request = scoring.request
        context = range(request.num_shared, request.num_context)
        rows = [*context, *(() if winner is None else self.kept_rows(winner))]
        return [row for row in rows if row < request.num_computed]

    def kept_rows(self, winner: int) -> list[int]:
        """Return the tree rows whose KV the program goes on with.

        They are the winner's, as far as its path is the row with that choice: a terminator's
        tokens are not, nor what it changed in the choice's own.
        """
        request, tree = self.main.request, self.main.tree
        wanted = self.rows[winner][tree.num_context :]
        kept = []
        for row, token_id in zip(tree.winner_rows(winner), wanted, strict=False):
            if request.token_ids[row] != token_id:
                break
            kept.append(row)
        return kept
