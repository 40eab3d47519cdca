"""What an endpoint answered: chunks put together as samples, failures as errors.

Takes the client's objects for either endpoint; sends and retries nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import openai

from umbel.lang.errors import (
    BackendConnectionError,
    BackendError,
    BackendStatusError,
    BackendTimeoutError,
)
from umbel.lang.ir import Gen
from umbel.lang.results import FinishReason, Sample, TokenLogprob, Usage

from ..stop_filter import StopFilter
from .openai_features import BACKEND

UNKNOWN_TOKEN = -1  # such endpoints name tokens by their text, never by their id
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_RETRYABLE = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_NEVER = frozenset({"insufficient_quota"})  # a 429 that no waiting cures


class SampleReader:
    """One sample as its chunks come in."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = StopFilter(stops)
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._reason: FinishReason | None = None
        self._matched: str | int | None = None

    @property
    def is_done(self) -> bool:
        """Whether the sample's end has been seen."""
        return self._reason is not None

    @property
    def is_cut(self) -> bool:
        """Whether it was ended here, at a stop that the endpoint went past."""
        return self._stops.matched is not None

    def feed(self, choice: Any) -> str:
        """Take one choice of a chunk (or of a whole answer) and return its certain new text.

        Raises BackendError for an end that is no value: a refusal, a filter, a tool call.
        """
        if self.is_done:
            return ""
        text, refusal = _text_of(choice)
        if refusal:
            raise BackendError(f"the model refused: {refusal}", backend=BACKEND)
        self._logprobs += logprobs_of(choice)
        released = self._stops.feed(text)
        if self._stops.matched is not None:
            self._reason, self._matched = "stop", self._stops.matched
        elif choice.finish_reason is not None:
            reason = _REASONS.get(choice.finish_reason)
            if reason is None:
                raise BackendError(
                    f"the endpoint ended the text with finish_reason {choice.finish_reason!r}",
                    backend=BACKEND,
                )
            self._reason = reason
            self._matched = getattr(choice, "stop_reason", None)  # vLLM's and our own addition
            released += self._stops.finish()
        if released:
            self._texts.append(released)
        return released

    def sample(self) -> Sample:
        """Return the sample; raises BackendConnectionError when its end was not seen."""
        if self._reason is None:
            raise broken_stream()
        return Sample(
            "".join(self._texts),
            finish_reason=self._reason,
            matched_stop=self._matched,
            logprobs=tuple(self._logprobs),
        )


class ReplyReader:
    """All samples of one gen as their chunks come in."""

    def __init__(self, gen: Gen) -> None:
        self._readers = [SampleReader(gen.sampling.stop) for _ in range(gen.n)]
        self.usage = Usage()

    @property
    def is_done(self) -> bool:
        """Whether the end of every sample has been seen."""
        return all(reader.is_done for reader in self._readers)

    @property
    def is_cut(self) -> bool:
        """Whether a sample was ended here, so that the endpoint may go on for nothing."""
        return any(reader.is_cut for reader in self._readers)

    def feed(self, chunk: Any) -> str:
        """Take a chunk and return the new text of the first sample."""
        if chunk.usage is not None:
            self.usage = usage_of(chunk.usage)
        first = ""
        for choice in chunk.choices:
            if not 0 <= choice.index < len(self._readers):
                raise BackendError(
                    f"the endpoint sent sample {choice.index} of {len(self._readers)}",
                    backend=BACKEND,
                )
            released = self._readers[choice.index].feed(choice)
            if choice.index == 0:
                first += released
        return first

    def samples(self) -> list[Sample]:
        """Return the samples in order; raises BackendConnectionError unless all have ended."""
        return [reader.sample() for reader in self._readers]


def broken_stream() -> BackendConnectionError:
    """Return the error of a stream that ended before its text did."""
    return BackendConnectionError(
        "the endpoint closed the stream before the text's end", backend=BACKEND, retryable=True
    )


def usage_of(usage: Any) -> Usage:
    """Return token counts as ours."""
    details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt_tokens=usage.prompt_tokens or 0,
        cached_tokens=(details and details.cached_tokens) or 0,
        completion_tokens=usage.completion_tokens or 0,
    )


def logprobs_of(choice: Any) -> list[TokenLogprob]:
    """Return the log-probabilities of a choice's tokens; their ids are not known."""
    logprobs = choice.logprobs
    if logprobs is None:
        return []
    content = getattr(logprobs, "content", None)
    if content is not None:
        return [
            TokenLogprob(
                UNKNOWN_TOKEN,
                token.logprob,
                tuple((UNKNOWN_TOKEN, top.logprob) for top in token.top_logprobs or ()),
                token.token,
                tuple(top.token for top in token.top_logprobs or ()),
            )
            for token in content
        ]
    values = getattr(logprobs, "token_logprobs", None) or []
    tops = getattr(logprobs, "top_logprobs", None) or [{}] * len(values)
    texts = getattr(logprobs, "tokens", None) or [""] * len(values)
    return [
        TokenLogprob(
            UNKNOWN_TOKEN,
            value,
            tuple((UNKNOWN_TOKEN, other) for other in (top or {}).values()),
            text,
            tuple(top or {}),
        )
        for value, top, text in zip(values, tops, texts, strict=True)
    ]


def next_tokens(choice: Any) -> dict[str, float]:
    """Return the likeliest first tokens of a choice, by their text."""
    logprobs = choice.logprobs
    content = getattr(logprobs, "content", None)
    if content:
        return {top.token: top.logprob for top in content[0].top_logprobs or ()}
    tops = getattr(logprobs, "top_logprobs", None)
    return dict(tops[0]) if tops and tops[0] else {}


def echoed_tokens(choice: Any) -> tuple[list[str], list[float | None]]:
    """Return the tokens of an echoed prompt and their log-probabilities."""
    logprobs = choice.logprobs
    tokens = getattr(logprobs, "tokens", None)
    if not tokens:
        raise BackendError(
            "the endpoint echoed no log-probabilities: it can't score choices this way",
            backend=BACKEND,
        )
    return list(tokens), list(logprobs.token_logprobs)


def _text_of(choice: Any) -> tuple[str, str]:
    """Return a choice's text and the model's refusal, from a chunk or a whole answer."""
    part = getattr(choice, "delta", None) or getattr(choice, "message", None)
    if part is None:
        return getattr(choice, "text", None) or "", ""
    return part.content or "", getattr(part, "refusal", None) or ""


def error_of(error: Exception, url: str) -> BackendError:
    """Return what the client raised as ours, without what it holds of the request.

    The client's errors hold the request with its credentials, so they are not chained.
    """
    match error:
        case openai.APITimeoutError():
            return BackendTimeoutError(
                f"{url} did not answer in time: is it overloaded? Or raise timeout=",
                backend=BACKEND,
                retryable=True,
            )
        case openai.APIConnectionError():
            why = str(error.__cause__ or error) or type(error.__cause__ or error).__name__
            return BackendConnectionError(
                f"the connection to {url} failed: {why}", backend=BACKEND, retryable=True
            )
        case openai.APIStatusError():
            is_retryable = error.status_code in _RETRYABLE and error.code not in _NEVER
            return BackendStatusError(
                f"{url} answered {error.status_code}: {_message(error)}",
                backend=BACKEND,
                retryable=is_retryable,
                status_code=error.status_code,
                request_id=error.request_id or "",
            )
        case openai.APIError():
            kind = error.type or ""
            return BackendError(
                f"{url} failed while it answered: {_message(error)}",
                backend=BACKEND,
                retryable=kind in ("server_error", "rate_limit_error"),
            )
        case json.JSONDecodeError():
            return BackendError(f"{url} sent what is not JSON: {error}", backend=BACKEND)
        case _:
            return BackendError(
                f"{url} sent what is no answer: {type(error).__name__}: {error}", backend=BACKEND
            )


def retry_after(error: Exception) -> float | None:
    """Return the seconds that an endpoint asks us to wait."""
    if not isinstance(error, openai.APIStatusError):
        return None
    try:
        return max(0.0, float(error.response.headers.get("retry-after", "")))
    except ValueError:  # absent, or a date
        return None


def _message(error: openai.APIError) -> str:
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return str(body["message"])
    return error.message[:300]
