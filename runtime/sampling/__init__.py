"""From logits to tokens and scores."""

from .choice_tree import ChoiceScorer, ChoiceTree, ScoredRows
from .random_numbers import uniform
from .row_scores import RankedArray, RowScores, score_rows
from .sampler import SampledTokens, Sampler, SamplingRow, token_logprobs

__all__ = [
    "ChoiceScorer",
    "ChoiceTree",
    "RankedArray",
    "RowScores",
    "SampledTokens",
    "Sampler",
    "SamplingRow",
    "ScoredRows",
    "score_rows",
    "token_logprobs",
    "uniform",
]
