"""From logits to tokens and scores."""

from .choice_tree import ChoiceScorer, ChoiceTree
from .random_numbers import uniform
from .sampler import SampledTokens, Sampler, SamplingRow, token_logprobs

__all__ = [
    "ChoiceScorer",
    "ChoiceTree",
    "SampledTokens",
    "Sampler",
    "SamplingRow",
    "token_logprobs",
    "uniform",
]
