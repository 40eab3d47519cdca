"""Picks one of several scored choices; knows log-probabilities, not where they come from.

The five methods of `select` as pure functions of one table, so that every backend that can score
tokens decides in the same way. See rule 11 in docs/semantics.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .ir import Select, SelectMethod
from .results import ChoiceScore, NodeResult


def score_choices(
    choices: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    method: SelectMethod,
    unconditional: Sequence[Sequence[float]] | None = None,
    *,
    num_bytes: Sequence[int] | None = None,
) -> tuple[int, tuple[ChoiceScore, ...]]:
    """Return the winner's index and the whole table, one row per choice in the given order.

    `token_ids[i]` and `logprobs[i]` are choice i's tokens after the scored context. A choice
    without tokens has sum, mean and per-byte 0. `unconditional[i]` are the log-probabilities of
    the same tokens without context; the first of them counts as 0, since a token needs something
    to follow. `num_bytes[i]` is the length of choice i after the scored context, where that
    differs from the choice's own UTF-8 length.

    Each method's scores (the highest wins, ties go to the earlier choice):

    - ``token_length_normalized``: mean; ``sum``: sum; ``byte_normalized``: sum / bytes.
    - ``unconditional_likelihood_normalized``: mean - unconditional mean.
    - ``greedy_token_selection``: token by token only the rows at the maximum stay, a row that has
      ended goes on with its own mean. A row's score is what it lacked to the maximum at the token
      where it fell out; 0 for rows that stayed to the end.

    `probability` is the softmax of the method's scores at temperature 1.

    Raises ValueError for an empty table, rows of unequal length, a log-probability that is not a
    number, an unknown method, and an unconditional method without unconditional log-probabilities.
    """
    _check(choices, token_ids, logprobs, unconditional)
    sums = [math.fsum(row) for row in logprobs]
    means = [s / max(len(row), 1) for s, row in zip(sums, logprobs, strict=True)]
    sizes = [len(c.encode()) for c in choices] if num_bytes is None else list(num_bytes)
    per_byte = [s / max(size, 1) for s, size in zip(sums, sizes, strict=True)]
    rows: Sequence[Sequence[float]] = unconditional if unconditional is not None else ()
    match method:
        case "token_length_normalized":
            scores = means
        case "sum":
            scores = sums
        case "byte_normalized":
            scores = per_byte
        case "greedy_token_selection":
            scores = _greedy_scores(logprobs, means)
        case "unconditional_likelihood_normalized":
            if unconditional is None:
                raise ValueError(f"{method} needs the log-probabilities without context")
            scores = [
                _minus(mean, math.fsum(row[1:]) / max(len(row), 1))
                for mean, row in zip(means, rows, strict=True)
            ]
        case _:
            raise ValueError(f"unknown select method {method!r}")
    probabilities = softmax(scores)
    table = tuple(
        ChoiceScore(
            choice=choice,
            token_ids=tuple(token_ids[i]),
            token_logprobs=tuple(logprobs[i]),
            sum=sums[i],
            mean=means[i],
            per_byte=per_byte[i],
            probability=probabilities[i],
            score=scores[i],
            unconditional_logprobs=tuple(rows[i]) if rows else (),
        )
        for i, choice in enumerate(choices)
    )
    return scores.index(max(scores)), table


def beginning_choice(choices: Iterable[str]) -> tuple[str, str] | None:
    """Return a choice and another one that it begins, if there are such: their ends are scored."""
    ordered = sorted(choices)  # what begins others stands right before one of them
    return next(
        ((short, long) for short, long in pairwise(ordered) if long.startswith(short)), None
    )


def softmax(scores: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Return the softmax of score / temperature; scores that are all -inf share equally."""
    top = max(scores)
    if top == -math.inf:
        return [1.0 / len(scores)] * len(scores)
    weights = [math.exp((score - top) / temperature) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def draw(scores: Sequence[ChoiceScore], temperature: float, u: float) -> int:
    """Return the row that `u` in [0, 1) picks from the softmax of score / temperature.

    Walks the rows in order, so that one `u` means one choice on every backend. Temperature 0
    picks the best row.
    """
    values = [row.score for row in scores]
    if temperature <= 0:
        return values.index(max(values))
    reached = 0.0
    probabilities = softmax(values, temperature)
    for i, probability in enumerate(probabilities):
        reached += probability
        if u < reached:
            return i
    # rounding can leave the total a little under 1: the last row that has any weight
    return max(i for i, probability in enumerate(probabilities) if probability > 0)


def only_choice(select: Select) -> NodeResult:
    """Return the result of a select with one choice, which nothing has to score."""
    (only,) = select.choices
    _, table = score_choices((only,), ((),), ((),), select.method, ((),))
    return NodeResult(text=only, scores=table)


def _check(
    choices: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    unconditional: Sequence[Sequence[float]] | None,
) -> None:
    if not choices:
        raise ValueError("there are no choices to score")
    tables = (
        (token_ids, logprobs) if unconditional is None else (token_ids, logprobs, unconditional)
    )
    if any(len(table) != len(choices) for table in tables):
        raise ValueError(f"{len(choices)} choices need as many rows in every table")
    for i, choice in enumerate(choices):
        if len({len(table[i]) for table in tables}) != 1:
            raise ValueError(f"choice {choice!r} has rows of unequal length")
        if any(math.isnan(x) for table in tables[1:] for x in table[i]):
            raise ValueError(f"choice {choice!r} has a log-probability that is not a number")


def _greedy_scores(logprobs: Sequence[Sequence[float]], means: Sequence[float]) -> list[float]:
    scores = [0.0] * len(logprobs)
    left = list(range(len(logprobs)))
    for depth in range(max(len(row) for row in logprobs)):
        at = {i: logprobs[i][depth] if depth < len(logprobs[i]) else means[i] for i in left}
        top = max(at.values())
        for i in left:
            if at[i] < top:
                scores[i] = at[i] - top
        left = [i for i in left if at[i] == top]
        if len(left) == 1:
            break
    return scores


def _minus(mean: float, unconditional: float) -> float:
    """Subtract so that an impossible choice stays impossible and no score becomes +inf or nan."""
    if mean == -math.inf or unconditional == -math.inf:
        return mean
    return mean - unconditional
