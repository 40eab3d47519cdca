"""What is known of a value, in the form of SGLang's meta_info dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from umbel.lang.results import Sample, TokenLogprob
from umbel.lang.transcript import NodeMeta

#: a token as SGLang tells it: log-probability, id, and its text where the backend tells it
Token = tuple[float, int, str | None]


def meta_info(meta: NodeMeta) -> dict[str, Any] | list[dict[str, Any]]:
    """Return a value's metadata: a list of them where there are several samples."""
    if not meta.samples:
        return _of_select(meta)
    if len(meta.samples) == 1:
        return _of_sample(meta, meta.samples[0])
    return [_of_sample(meta, sample) for sample in meta.samples]


def running_meta_info() -> dict[str, Any]:
    """Return the metadata of a value that is still being generated."""
    return {"finish_reason": None, "output_token_logprobs": [], "output_top_logprobs": []}


def _of_sample(meta: NodeMeta, sample: Sample) -> dict[str, Any]:
    usage, timings = meta.usage, meta.timings
    reason: dict[str, Any] = {"type": sample.finish_reason}
    if sample.finish_reason == "length":
        reason["length"] = len(sample.token_ids)
    else:
        reason["matched"] = sample.matched_stop
    found: dict[str, Any] = {
        "id": meta.address,
        "finish_reason": reason,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": usage.cached_tokens,
        "e2e_latency": timings.finished - timings.ready,
    }
    if sample.logprobs:
        found["output_token_logprobs"] = _tokens(sample.logprobs)
        found["output_top_logprobs"] = _alternatives(sample.logprobs)
    if sample.prompt_logprobs:
        found["input_token_logprobs"] = _tokens(sample.prompt_logprobs)
        found["input_top_logprobs"] = _alternatives(sample.prompt_logprobs)
    return found


def _of_select(meta: NodeMeta) -> dict[str, Any]:
    rows = meta.scores
    found: dict[str, Any] = {
        "normalized_prompt_logprobs": [row.mean for row in rows],
        "input_token_logprobs": [_pairs(row.token_logprobs, row.token_ids) for row in rows],
        "output_token_logprobs": [[] for _ in rows],
    }
    if any(row.unconditional_logprobs for row in rows):
        found["unconditional_token_logprobs"] = [
            _pairs(row.unconditional_logprobs, row.token_ids) for row in rows
        ]
        found["normalized_unconditional_prompt_logprobs"] = [row.score for row in rows]
    return found


def _pairs(logprobs: Sequence[float], ids: Sequence[int]) -> list[Token]:
    return [(logprob, token_id, None) for logprob, token_id in zip(logprobs, ids, strict=True)]


def _tokens(logprobs: Sequence[TokenLogprob]) -> list[Token]:
    return [(token.logprob, token.token_id, token.text or None) for token in logprobs]


def _alternatives(logprobs: Sequence[TokenLogprob]) -> list[list[Token]]:
    return [
        [
            (logprob, i, text or None)
            for (i, logprob), text in zip_longest(token.top, token.top_texts[: len(token.top)])
        ]
        for token in logprobs
    ]
