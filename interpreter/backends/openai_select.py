"""Scores a select's choices by the log-probabilities that an endpoint gives; sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from umbel.lang.choice_scoring import draw, score_choices
from umbel.lang.errors import BackendError, UnsupportedFeatureError
from umbel.lang.ir import Select
from umbel.lang.results import ChoiceScore

from .openai_features import BACKEND
from .openai_replies import UNKNOWN_TOKEN


def score_next_tokens(
    select: Select, tops: Mapping[str, float], u: float
) -> tuple[int, tuple[ChoiceScore, ...]]:
    """Score choices that are single tokens among the likeliest next ones.

    Returns the winner's index and the table; raises UnsupportedFeatureError for a choice that is
    not there, since guessing its score could pick another winner.
    """
    for choice in select.choices:
        if choice not in tops:
            raise UnsupportedFeatureError(
                backend=BACKEND,
                feature=f"scoring {choice!r}",
                hint=f"it is not one token among the {len(tops)} likeliest next ones: use choices "
                "of one token, or emulate=True",
            )
    return _decide(select, [[tops[choice]] for choice in select.choices], u)


def score_echoes(
    select: Select, echoes: Sequence[tuple[list[str], list[float | None]]], u: float
) -> tuple[int, tuple[ChoiceScore, ...]]:
    """Score choices by the echoed tokens of prompt + choice, one row for each choice.

    The scored context is the longest common token prefix of all rows (rule 11). Returns the
    winner's index and the table; raises BackendError for rows that can't be scored.
    """
    if len(echoes) != len(select.choices):
        raise BackendError(
            f"the endpoint echoed {len(echoes)} prompts of {len(select.choices)}", backend=BACKEND
        )
    tokens = [row for row, _ in echoes]
    shared = 0
    while all(len(row) > shared and row[shared] == tokens[0][shared] for row in tokens):
        shared += 1
    logprobs: list[list[float]] = []
    for choice, (names, values) in zip(select.choices, echoes, strict=True):
        row = values[shared : len(names)]
        if not row:
            raise UnsupportedFeatureError(
                backend=BACKEND,
                feature=f"scoring {choice!r}",
                hint="its tokens begin another choice's: pass terminator=",
            )
        known = [value for value in row if value is not None]
        if len(known) != len(row):
            raise UnsupportedFeatureError(
                backend=BACKEND,
                feature="a select without text before it",
                hint="the endpoint scores no first token: write some text first",
            )
        logprobs.append(known)
    return _decide(select, logprobs, u)


def _decide(
    select: Select, logprobs: list[list[float]], u: float
) -> tuple[int, tuple[ChoiceScore, ...]]:
    ids = [[UNKNOWN_TOKEN] * len(row) for row in logprobs]
    winner, table = score_choices(select.choices, ids, logprobs, select.method)
    if select.temperature > 0:
        winner = draw(table, select.temperature, u)
    return winner, table
