"""Decoding parameters, checked once when made; knows nothing of logits or tensors."""

from __future__ import annotations

import math

import msgspec

#: of tokens, or the largest token id: what every backend and wire can count to
MAX_COUNT = (1 << 31) - 1
#: what a bias or a penalty may add to a logit: sums of such stay finite in 32 bits
MAX_SHIFT = 1e30


class SamplingParams(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """How one `gen` picks its tokens.

    `temperature=0` is greedy. `top_k=0`, `top_p=1.0` and `min_p=0.0` switch their filter off.
    Filters apply in the order temperature, top-k, top-p, min-p. `max_tokens` counts sampled
    tokens. `seed` replaces the seed that is derived from the run's seed and the node's address.

    Raises ValueError when a field is out of its bounds; the message names the field.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        """Refuse values that have no meaning."""

        def need(ok: bool, name: str, bound: str) -> None:
            if not ok:
                raise ValueError(f"{name} must be {bound}, not {getattr(self, name)!r}")

        need(self.max_tokens >= 1, "max_tokens", "at least 1")
        need(self.max_tokens <= MAX_COUNT, "max_tokens", f"at most {MAX_COUNT:,}")
        need(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "from 0 to max_tokens")
        need(_finite(self.temperature) and self.temperature >= 0, "temperature", "0 or more")
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(self.top_k >= 0, "top_k", "0 (off) or more")
        need(self.top_k <= MAX_COUNT, "top_k", f"at most {MAX_COUNT:,}")
        need(self.seed is None or -(1 << 63) <= self.seed < 1 << 64, "seed", "of 64 bits")
        _check_bias(self.logit_bias)
        need(
            all(0 <= i <= MAX_COUNT for i in self.stop_token_ids),
            "stop_token_ids",
            f"token ids, from 0 to {MAX_COUNT:,}",
        )
        need(0 <= self.min_p < 1, "min_p", "from 0 to below 1")
        span = f"from -{MAX_SHIFT:g} to {MAX_SHIFT:g}"
        need(abs(self.frequency_penalty) <= MAX_SHIFT, "frequency_penalty", span)
        need(abs(self.presence_penalty) <= MAX_SHIFT, "presence_penalty", span)
        need(self.repetition_penalty > 0, "repetition_penalty", "above 0")
        need(
            1 / MAX_SHIFT <= self.repetition_penalty <= MAX_SHIFT,
            "repetition_penalty",
            f"from {1 / MAX_SHIFT:g} to {MAX_SHIFT:g}",
        )
        need(all(self.stop), "stop", "strings that are not empty")
        need(all(self.stop_regex), "stop_regex", "patterns that are not empty")
        need(0 <= self.top_logprobs <= 100, "top_logprobs", "from 0 to 100")


def _check_bias(bias: tuple[tuple[int, float], ...]) -> None:
    """Raise ValueError for the first entry out of bounds; a whole vocabulary may be around it."""
    for token_id, shift in bias:
        if not (0 <= token_id <= MAX_COUNT and abs(shift) <= MAX_SHIFT):
            raise ValueError(
                f"logit_bias must be numbers from -{MAX_SHIFT:g} to {MAX_SHIFT:g} by token id, "
                f"from 0 on, not {token_id}: {shift}"
            )


def _finite(x: float) -> bool:
    return math.isfinite(x)
