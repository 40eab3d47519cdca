"""What an engine made, in the form of OpenAI's answers, chunks and errors; runs nothing."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from umbel.lang.errors import RequestRejectedError, UmbelError
from umbel.lang.results import NodeResult, Sample, TokenLogprob

from .status import ModelNotFoundError, status_of

TokenBytes = Sequence[bytes]  # by token id; ids beyond its end are padding
Endpoint = Literal["chat", "completions"]
Json = dict[str, Any]

_MIN_LOGPROB = -9999.0  # JSON has no -inf; OpenAI's own stand-in


class AnswerForm:
    """Writes one request's answer, whole or in chunks; all parts share an id and a time."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        num_samples: int,
        token_bytes: TokenBytes | None,
        *,
        echoes_only: bool = False,
        scores_prompt: bool = False,
    ) -> None:
        self.echoes_only = echoes_only  # what was generated is left out
        self._scores_prompt = scores_prompt
        self._num_samples = num_samples  # of each prompt, one after the other
        self._is_chat = endpoint == "chat"
        self._token_bytes = token_bytes
        prefix = "chatcmpl" if self._is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    def whole(self, results: Sequence[NodeResult], prefixes: Sequence[str]) -> Json:
        """Return the whole answer; `prefixes` are echoed prompts."""
        choices = []
        for i, (result, prefix) in enumerate(zip(results, prefixes, strict=True)):
            sample = result.samples[0]
            text: Json = {"text": prefix + ("" if self.echoes_only else sample.text)}
            if self._is_chat:
                message = {"role": "assistant", "content": sample.text, "refusal": None}
                text = {"message": message}
            choices.append({"index": i, **text, **self._end(sample, prefix)})
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self._usage(results)}

    def first(self, index: int, prefix: str) -> Json | None:
        """Return the chunk that opens a sample, if there is anything to say."""
        if self._is_chat:
            return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
        return self._chunk(index, {"text": prefix}) if prefix else None

    def delta(self, index: int, text: str) -> Json:
        """Return a chunk with more text."""
        return self._chunk(index, {"delta": {"content": text}} if self._is_chat else {"text": text})

    def last(self, index: int, result: NodeResult, prefix: str) -> Json:
        """Return the chunk that ends a sample; it holds all log-probabilities, if any.

        Those of the echoed prompt `prefix` are among them.
        """
        text: Json = {"delta": {}} if self._is_chat else {"text": ""}
        return self._chunk(index, text, self._end(result.samples[0], prefix))

    def usage(self, results: Sequence[NodeResult]) -> Json:
        """Return the chunk with the token counts."""
        return {**self._head, "object": self._kind, "choices": [], "usage": self._usage(results)}

    def _usage(self, results: Sequence[NodeResult]) -> Json:
        """Return the token counts; a prompt counts once, whatever its number of samples."""
        prompts = [result.usage for result in results[:: self._num_samples]]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        made = () if self.echoes_only else results
        completion = sum(result.usage.completion_tokens for result in made)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in prompts)},
        }

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._is_chat else "text_completion"

    def _chunk(self, index: int, text: Json, end: Json | None = None) -> Json:
        end = end or {"logprobs": None, "finish_reason": None}
        return {**self._head, "object": self._kind, "choices": [{"index": index, **text, **end}]}

    def _end(self, sample: Sample, prefix: str) -> Json:
        if self.echoes_only:
            sample = Sample(text="", finish_reason="length", prompt_logprobs=sample.prompt_logprobs)
        made: Json = {"logprobs": None, "finish_reason": sample.finish_reason}
        if self._token_bytes is not None:
            if self._scores_prompt:
                made["logprobs"] = _echo_logprobs(prefix, sample, self._token_bytes)
            elif sample.logprobs:
                write = _chat_logprobs if self._is_chat else _completion_logprobs
                made["logprobs"] = write(sample.logprobs, self._token_bytes)
        if sample.matched_stop is not None:
            made["stop_reason"] = sample.matched_stop
        return made


def error_json(error: UmbelError) -> tuple[int, Json]:
    """Return the status and the body of an error."""
    status = status_of(error)
    kind = "invalid_request_error"
    if status == 429:
        kind = "rate_limit_error"
    elif status >= 500:
        kind = "server_error"
    code = None
    if isinstance(error, ModelNotFoundError):
        code = "model_not_found"
    elif isinstance(error, RequestRejectedError):
        code = "context_length_exceeded" if error.reason == "too_long" else error.reason
    body = {"message": str(error), "type": kind, "param": None, "code": code}
    return status, {"error": body}


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


def _bytes_of(token_id: int, token_bytes: TokenBytes) -> bytes:
    return token_bytes[token_id] if token_id < len(token_bytes) else b""


def _text_of(token_id: int, token_bytes: TokenBytes) -> str:
    return _bytes_of(token_id, token_bytes).decode("utf-8", "replace")


def _spelled(token_id: int, logprob: float, token_bytes: TokenBytes) -> Json:
    spelled = _bytes_of(token_id, token_bytes)
    return {
        "token": _text_of(token_id, token_bytes),
        "logprob": _finite(logprob),
        "bytes": list(spelled),
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes) -> Json:
    return {
        "content": [
            {
                **_spelled(token.token_id, token.logprob, token_bytes),
                "top_logprobs": [_spelled(i, value, token_bytes) for i, value in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _completion_logprobs(tokens: Sequence[TokenLogprob], token_bytes: TokenBytes) -> Json:
    names = [_text_of(token.token_id, token_bytes) for token in tokens]
    offsets, at = [], 0
    for name in names:
        offsets.append(at)
        at += len(name)
    tops = []
    for token in tokens:
        top: dict[str, float] = {}
        for i, value in token.top:  # the likeliest first: of tokens that read the same it counts
            top.setdefault(_text_of(i, token_bytes), _finite(value))
        tops.append(top)
    return {
        "tokens": names,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _echo_logprobs(prompt: str, sample: Sample, token_bytes: TokenBytes) -> Json:
    """Return the log-probabilities of a prompt and of what follows it.

    A prompt's first token has none. It is what the others leave of the text: nothing if it was
    BOS, which the answer then leaves out.
    """
    scored = [*sample.prompt_logprobs, *sample.logprobs]
    made = _completion_logprobs(scored, token_bytes)
    rest = b"".join(_bytes_of(token.token_id, token_bytes) for token in sample.prompt_logprobs)
    spelled = prompt.encode()
    first = spelled[: len(spelled) - len(rest)].decode("utf-8", "replace")
    if not first:
        return made
    return {
        "tokens": [first, *made["tokens"]],
        "token_logprobs": [None, *made["token_logprobs"]],
        "top_logprobs": [None, *made["top_logprobs"]],
        "text_offset": [0, *(len(first) + at for at in made["text_offset"])],
    }
