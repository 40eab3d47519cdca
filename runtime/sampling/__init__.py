"""From logits to tokens and scores."""

from .choice_tree import ChoiceTree
from .random_numbers import uniform
from .sampler import SampledTokens, Sampler, SamplingRow, token_logprobs

__all__ = [
    "ChoiceTree",
    "SampledTokens",
    "Sampler",
    "SamplingRow",
    "token_logprobs",
    "uniform",
]
