"""SGLang's choice methods as objects; the arithmetic is umbel's, and so is the rule for ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from umbel.lang.choice_scoring import score_choices
from umbel.lang.ir import SelectMethod

#: a token as SGLang tells it: log-probability, id, text
Token = Sequence[Any]


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """The choice that a method picks, and the table it picked from."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChoicesSamplingMethod:
    """One of umbel's select methods, by name.

    Calling it scores a table of log-probabilities that the caller has.
    """

    method: SelectMethod

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the method compares with the same tokens without context."""
        return self.method == "unconditional_likelihood_normalized"

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float] | None = None,
        input_token_logprobs: Sequence[Sequence[Token]],
        output_token_logprobs: Sequence[Sequence[Token]] | None = None,
        unconditional_token_logprobs: Sequence[Sequence[Token]] | None = None,
    ) -> ChoicesDecision:
        """Return the decision over a table: one row of tokens for each choice.

        The means are taken from the tokens themselves, so `normalized_prompt_logprobs` changes
        nothing. Raises ValueError as `umbel.score_choices` does.
        """
        winner, table = score_choices(
            choices,
            [[int(token[1]) for token in row] for row in input_token_logprobs],
            [[float(token[0]) for token in row] for row in input_token_logprobs],
            self.method,
            None
            if unconditional_token_logprobs is None
            else [[_logprob(token) for token in row] for row in unconditional_token_logprobs],
        )
        meta_info: dict[str, Any] = {
            "normalized_prompt_logprobs": [row.mean for row in table],
            "input_token_logprobs": input_token_logprobs,
            "output_token_logprobs": output_token_logprobs or [],
        }
        if unconditional_token_logprobs is not None:
            meta_info["unconditional_token_logprobs"] = unconditional_token_logprobs
        if self.requires_unconditional_logprobs:
            meta_info["normalized_unconditional_prompt_logprobs"] = [row.score for row in table]
        return ChoicesDecision(choices[winner], meta_info)


def _logprob(token: Token) -> float:
    return 0.0 if token[0] is None else float(token[0])  # a first token follows nothing


token_length_normalized = ChoicesSamplingMethod("token_length_normalized")
greedy_token_selection = ChoicesSamplingMethod("greedy_token_selection")
unconditional_likelihood_normalized = ChoicesSamplingMethod("unconditional_likelihood_normalized")
