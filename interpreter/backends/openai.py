"""An OpenAI-compatible endpoint as a backend, through the official client.

One thread runs one asyncio loop for all runs of a backend, so branches are answered side by side
without threads of their own. What the endpoint offers is declared (`EndpointFeatures`), never
probed; what it can't honour is refused before anything is sent.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
import openai

from umbel.lang.errors import BackendError, ProgramError, UnsupportedFeatureError
from umbel.lang.graph import GraphNode, node_seed
from umbel.lang.ir import Gen, Select
from umbel.lang.results import NodeResult, RunOptions, Sample, Timings, Usage

from ..credentials import without_credentials
from .base import EventSink, TokenCounter
from .loop_thread import LoopThread
from .openai_features import (
    BACKEND,
    CHAT,
    COMPLETIONS,
    Endpoint,
    EndpointFeatures,
    Refusals,
    capabilities_of,
)
from .openai_replies import (
    ReplyReader,
    broken_stream,
    echoed_tokens,
    error_of,
    next_tokens,
    retry_after,
    usage_of,
)
from .openai_requests import (
    Arguments,
    Prompt,
    add_echo,
    add_gen,
    add_next_token,
    base_arguments,
    emulated_gen,
    value_form,
)
from .openai_select import score_echoes, score_next_tokens
from .openai_session import OpenAISession

T = TypeVar("T")
DEFAULT_URL = "https://api.openai.com/v1"
EMULATION_ATTEMPTS = 3
MAX_HELPER_THREADS = 2
_SENT_HEADERS = frozenset(
    {
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "host",
        "transfer-encoding",
        "user-agent",
    }
)
_MAX_BACKOFF_S = 8.0
_MAX_RETRY_AFTER_S = 60.0


class OpenAIBackend:
    """Runs programs on an OpenAI-compatible endpoint.

    `endpoint` is "chat" (turns become messages) or "completions" (programs without turns).
    `features` says what the endpoint honours; the defaults are OpenAI's own. With `emulate=True`
    choices, regular expressions and selects that the endpoint lacks are asked for in plain words or
    through a schema, checked, and tried again up to three times.

    The key comes from `api_key`, or, for OpenAI's own address alone, from OPENAI_API_KEY; so that
    variable never reaches another host. `timeout` bounds the wait for an answer's next bytes.
    Connections that fail, and statuses that say so, are tried again `max_retries` times, unless
    text was handed on already.

    Raises ProgramError for an address or option that can't be used or a key that is missing.
    """

    name = BACKEND
    token_counter: TokenCounter | None = None  # the tokenizer is the endpoint's

    def __init__(
        self,
        model: str,
        *,
        endpoint: Endpoint = "chat",
        base_url: str | None = None,
        api_key: str | None = None,
        features: EndpointFeatures | None = None,
        emulate: bool = False,
        timeout: float = 60.0,
        max_retries: int = 2,
        backoff_s: float = 0.5,
        proxy: str | None = None,
    ) -> None:
        if endpoint not in ("chat", "completions"):
            raise ProgramError(f"endpoint is 'chat' or 'completions', not {endpoint!r}")
        if features is None:
            features = CHAT if endpoint == "chat" else COMPLETIONS
        if endpoint == "chat" and features.select_by == "echo":
            raise ProgramError("a chat endpoint echoes no prompt: use select_by='top_logprobs'")
        self.model_name = model
        self.endpoint: Endpoint = endpoint
        self.url = _checked_url(base_url or DEFAULT_URL)
        self.features = features
        self.capabilities = capabilities_of(endpoint, features, emulate)
        self._emulate = emulate
        self._max_retries = max_retries
        self._backoff_s = backoff_s
        self._key = _find_key(api_key, is_own_url=base_url is None)
        self._counters = {"requests": 0.0, "retries": 0.0, "failures": 0.0}
        self._sessions: set[OpenAISession] = set()
        self._client = openai.AsyncOpenAI(
            api_key=self._key or "none",  # a server of one's own wants none, the client does
            base_url=self.url,
            timeout=openai.Timeout(timeout, connect=min(timeout, 10.0), pool=None),
            max_retries=0,  # ours know what was handed on
            http_client=openai.DefaultAsyncHttpxClient(
                trust_env=False, proxy=proxy, event_hooks={"request": [self._own_headers]}
            ),
        )
        self._thread = LoopThread(
            "umbel-openai",
            backend=BACKEND,
            closed_error=self._closed_error,
            fail_open=self._fail_sessions,
            close_client=self._client.close,
            # the client looks names up in threads: a few serve all branches
            executor=ThreadPoolExecutor(MAX_HELPER_THREADS, "umbel-openai"),
        )

    def open(self, options: RunOptions, sink: EventSink) -> OpenAISession:
        """Start a run; its events go to `sink` on the loop's thread. Raises BackendError."""
        refusals = Refusals(self.endpoint, self.features, self.capabilities)
        session = OpenAISession(self, options, sink, refusals)

        def start() -> None:
            self._sessions.add(session)
            session.start()

        self.call(start)
        return session

    def stats(self) -> dict[str, float]:
        """Return how many requests were sent, tried again, and failed in the end."""
        return dict(self._counters)

    def close(self) -> None:
        """Drop all connections: unfinished nodes fail with BackendError. Idempotent."""
        self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"OpenAIBackend({self.model_name!r}, endpoint={self.endpoint!r}, url={self.url!r})"

    # --- used by the sessions ---------------------------------------------------------------

    def call(self, command: Callable[[], object]) -> None:
        """Run a command on the loop's thread; raises BackendError once the backend is closed."""
        self._thread.call(command)

    def forget(self, session: OpenAISession) -> None:
        """Drop a run that is over."""
        self._sessions.discard(session)

    async def answer(
        self, node: GraphNode, prompt: Prompt, options: RunOptions, emit: Callable[[str], None]
    ) -> NodeResult:
        """Answer a gen or select; raises UmbelError. `emit` gets a gen's text as it comes."""
        op = node.op
        if isinstance(op, Gen):
            return await self._gen(node, op, prompt, options, emit)
        assert isinstance(op, Select)
        if self.features.select_by is None or op.method not in _scored(self.features):
            return await self._emulated_select(node, op, prompt, options)
        try:
            return await self._select(node, op, prompt, options)
        except UnsupportedFeatureError:
            if not self._emulate:
                raise
            return await self._emulated_select(node, op, prompt, options)

    # --- gens and selects ---------------------------------------------------------------------

    async def _gen(
        self,
        node: GraphNode,
        gen: Gen,
        prompt: Prompt,
        options: RunOptions,
        emit: Callable[[str], None],
    ) -> NodeResult:
        """Generate, and check what a constraint promised; emulated ones are tried again."""
        ready = time.monotonic()
        form = value_form(gen.constraint, self.features)
        attempts = EMULATION_ATTEMPTS if self._emulate and gen.constraint is not None else 1
        if attempts > 1 or not form.is_plain:
            emit = _keep
        for attempt in range(attempts):
            place = f"{node.address}#{attempt}" if attempt else node.address
            seed = node_seed(options.seed, options.row, place, 0, options.attempt) >> 1
            made = base_arguments(self.model_name, self.endpoint, prompt, self.features)
            made = add_gen(made, gen, form, self.endpoint, self.features, seed)
            reader, first_token = await self._stream(gen, made, emit)
            samples = []
            for sample in reader.samples():
                value = form.read(sample.text)
                if value is None and sample.finish_reason != "length":
                    break
                samples.append((sample, value))
            if len(samples) == gen.n:
                return _gen_result(samples, reader, Timings(ready, ready, first_token))
        raise BackendError(
            f"{node.label}: the endpoint's answer does not fit the constraint"
            + (f", in {attempts} attempts" if attempts > 1 else "")
            + f": {sample.text[:200]!r}",
            backend=BACKEND,
            retryable=True,
        )

    async def _stream(
        self, gen: Gen, made: Arguments, emit: Callable[[str], None]
    ) -> tuple[ReplyReader, float]:
        num_emitted = 0
        first_token = 0.0

        async def once() -> ReplyReader:
            nonlocal num_emitted, first_token
            reader = ReplyReader(gen)
            async with _ending(await self._create(made)) as stream:
                async for chunk in stream:
                    text = reader.feed(chunk)
                    if text:
                        first_token = first_token or time.monotonic()
                        num_emitted += emit is not _keep
                        emit(text)
                    if reader.is_done and (reader.is_cut or not self.features.usage):
                        break
            if not reader.is_done:
                raise broken_stream()
            return reader

        reader = await self._with_retries(once, lambda: num_emitted == 0)
        return reader, first_token

    async def _select(
        self, node: GraphNode, op: Select, prompt: Prompt, options: RunOptions
    ) -> NodeResult:
        made = base_arguments(self.model_name, self.endpoint, prompt, self.features)
        u = node_seed(options.seed, options.row, node.address, 0, options.attempt) / 2**64
        if self.features.select_by == "echo":
            made = add_echo(made, op, prompt.text)
        else:
            made = add_next_token(made, self.endpoint, self.features)
        reply = await self._with_retries(lambda: self._create(made), lambda: True)
        choices = sorted(reply.choices, key=lambda choice: choice.index)
        if self.features.select_by == "echo":
            winner, table = score_echoes(op, [echoed_tokens(choice) for choice in choices], u)
        else:
            if not choices:
                raise BackendError("the endpoint sent no choice", backend=BACKEND)
            winner, table = score_next_tokens(op, next_tokens(choices[0]), u)
        usage = Usage() if reply.usage is None else usage_of(reply.usage)
        return NodeResult(text=op.choices[winner], scores=table, usage=usage)

    async def _emulated_select(
        self, node: GraphNode, op: Select, prompt: Prompt, options: RunOptions
    ) -> NodeResult:
        answered = await self._gen(node, emulated_gen(op), prompt, options, _keep)
        if not answered.samples[0].accepting:
            raise BackendError(
                f"{node.label}: the endpoint chose none of the choices: {answered.text[:200]!r}",
                backend=BACKEND,
                retryable=True,
            )
        return NodeResult(text=answered.text, usage=answered.usage, timings=answered.timings)

    # --- calls ----------------------------------------------------------------------------------

    async def _create(self, made: Arguments) -> Any:
        self._counters["requests"] += 1
        if self.endpoint == "chat":
            return await self._client.chat.completions.create(**made)
        return await self._client.completions.create(**made)

    async def _with_retries(
        self, once: Callable[[], Awaitable[T]], may_retry: Callable[[], bool]
    ) -> T:
        """Call until it works, or fails in a way that no retry cures; raises BackendError."""
        attempt = 0
        while True:
            wait: float | None = None
            try:
                return await once()
            except BackendError as found:
                # without its frames: they hold the stream, and this frame would hold them
                error = self._cleaned(found).with_traceback(None)
            except Exception as found:  # an endpoint may send anything, and the client trusts it
                error = self._cleaned(error_of(found, self.url))
                wait = retry_after(found)
            if not error.retryable or attempt >= self._max_retries or not may_retry():
                self._counters["failures"] += 1
                raise error from None
            if wait is None:
                wait = min(self._backoff_s * 2**attempt, _MAX_BACKOFF_S)
                wait *= random.uniform(0.75, 1.25)
            self._counters["retries"] += 1
            attempt += 1
            await asyncio.sleep(min(wait, _MAX_RETRY_AFTER_S))

    async def _own_headers(self, request: Any) -> None:
        """Send our key and nothing else that names a caller.

        The client adds headers from the environment (OPENAI_CUSTOM_HEADERS, OPENAI_ORG_ID, ...),
        whatever the address is; these may hold another host's credentials.
        """
        headers = request.headers
        for name in list(headers):
            if name.lower() not in _SENT_HEADERS:
                del headers[name]
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"

    def _cleaned(self, error: BackendError) -> BackendError:
        """Take credentials out of a message that quotes what an endpoint said."""
        text = str(error)
        if self._key:
            text = text.replace(self._key, "[removed]")
        error.args = (without_credentials(text),)
        return error

    # --- the loop -------------------------------------------------------------------------------

    def _closed_error(self) -> BackendError:
        return BackendError(f"the backend on {self.url} was closed", backend=BACKEND)

    def _fail_sessions(self) -> None:
        for session in list(self._sessions):
            session.fail_all(lambda _: self._closed_error())


@asynccontextmanager
async def _ending(stream: Any) -> AsyncIterator[Any]:
    """Close a stream on the way out, and let the generators that read it come to their end.

    The client's stream and its generators hold each other. Left where they wait, they would be
    collected at some time, and finalised by some thread, while the loop goes on or has stopped. A
    read on a closed connection fails at once, and so through all of them.
    """
    try:
        yield stream
    finally:
        await stream.close()
        with suppress(Exception):
            async for _ in stream:
                pass


def _keep(_: str) -> None:
    """Hand no text on: it is not the value as it stands, or may be tried again."""


def _scored(features: EndpointFeatures) -> frozenset[str]:
    return capabilities_of("chat", features, emulate=False).select_methods


def _gen_result(
    samples: list[tuple[Sample, str | None]], reader: ReplyReader, timings: Timings
) -> NodeResult:
    """Return a gen's result; a sample without a value was cut, and keeps its raw text."""
    made = tuple(
        msgspec.structs.replace(
            sample, text=sample.text if value is None else value, accepting=value is not None
        )
        for sample, value in samples
    )
    return NodeResult(
        text=made[0].text if len(made) == 1 else "",
        samples=made,
        usage=reader.usage,
        timings=msgspec.structs.replace(timings, finished=time.monotonic()),
    )


def _checked_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ProgramError("base_url is an address that starts with http:// or https://")
    if parts.username or parts.password or parts.query:
        raise ProgramError(
            "base_url holds a user, a password or a query, which errors would show: "
            "pass the key as api_key="
        )
    return url.rstrip("/")


def _find_key(given: str | None, *, is_own_url: bool) -> str:
    if given is not None:
        return given
    if not is_own_url:
        return ""
    found = os.environ.get("OPENAI_API_KEY", "")
    if not found:
        raise ProgramError("OpenAI wants a key: set OPENAI_API_KEY, or pass api_key=")
    return found
