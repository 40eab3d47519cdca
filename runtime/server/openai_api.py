"""OpenAI's wire form: chat completions, completions and models, run as request graphs.

A request is compiled into a graph and run like any other; knows no engine's insides.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from umbel.lang.errors import ProgramError, UmbelError, WireError, from_wire
from umbel.lang.results import NodeFailed, NodeFinished, NodeResult, TextDelta
from umbel.lang.wire import JSON, RunRequest

from .event_stream import EventStream
from .openai_answers import AnswerForm, Json, TokenBytes, error_json
from .openai_wire import ChatRequest, CompletionRequest, decode
from .programs_api import ProgramsApi, unless_gone
from .run import ServerRun
from .service import Service
from .status import ModelNotFoundError

_DONE = b"data: [DONE]\n\n"


class OpenAIApi:
    """The routes. Runs are kept with those of `programs`, which cancels them when it stops.

    `token_bytes` spells each token; without it log-probabilities are refused.
    """

    def __init__(
        self,
        service: Service,
        programs: ProgramsApi,
        *,
        model_name: str,
        token_bytes: TokenBytes | None,
    ) -> None:
        self._service = service
        self._programs = programs
        self._model_name = model_name
        self._token_bytes = token_bytes
        self._created = int(time.time())
        self.router = APIRouter()
        post, get = self.router.post, self.router.get
        post("/v1/chat/completions", response_model=None)(self.chat)
        post("/v1/completions", response_model=None)(self.completions)
        get("/v1/models", response_model=None)(self.models)
        get("/v1/models/{name:path}", response_model=None)(self.model)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        try:
            asked = decode(await self._programs.read_body(request), ChatRequest)
            self._check(asked.model, bool(asked.logprobs))
            run_request, gens = asked.compile()
            form = AnswerForm("chat", self._model_name, asked.num_samples, self._token_bytes)
            return await self._answer(request, asked, run_request, gens, form, [""] * len(gens))
        except UmbelError as error:
            return _error_response(error)

    async def completions(self, request: Request) -> Response:
        """Go on with text."""
        try:
            asked = decode(await self._programs.read_body(request), CompletionRequest)
            self._check(asked.model, asked.logprobs is not None)
            run_request, gens = asked.compile()
            form = AnswerForm(
                "completions",
                self._model_name,
                asked.num_samples,
                self._token_bytes,
                echoes_only=asked.echoes_only,
                scores_prompt=asked.scores_prompt,
            )
            echoed = asked.prompts if asked.echo else [""] * len(asked.prompts)
            prefixes = [prompt for prompt in echoed for _ in range(asked.num_samples)]
            return await self._answer(request, asked, run_request, gens, form, prefixes)
        except UmbelError as error:
            return _error_response(error)

    async def models(self) -> Response:
        """List the one model."""
        return _json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, name: str) -> Response:
        """Describe the one model."""
        try:
            self._check(name, False)
        except UmbelError as error:
            return _error_response(error)
        return _json_response(self._model_card())

    def _model_card(self) -> Json:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "umbel",
        }

    def _check(self, model: str, wants_logprobs: bool) -> None:
        if model != self._model_name:
            raise ModelNotFoundError(
                f"there is no model {model!r} here; this server has {self._model_name!r}"
            )
        if wants_logprobs and self._token_bytes is None:
            raise ProgramError("this server can't spell tokens: leave logprobs out")

    async def _answer(
        self,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        run_request: RunRequest,
        gens: list[int],
        form: AnswerForm,
        prefixes: list[str],
    ) -> Response:
        run = await ServerRun.of_request(self._service, run_request)
        if asked.stream:
            chunks = _Chunks(form, gens, prefixes, asked.includes_usage)
            return _ChunkStream(self._programs, run, chunks, self._service.keep_alive_s)
        async with self._programs.running(run, ""):
            response = await unless_gone(request.receive, run.response())
        if response is None:
            return Response(status_code=499)
        if response.errors:
            raise _first_cause(response.errors)
        return _json_response(form.whole([response.results[gen] for gen in gens], prefixes))


class _Chunks:
    """Turns a run's events into the lines of a stream."""

    def __init__(
        self, form: AnswerForm, gens: list[int], prefixes: list[str], includes_usage: bool
    ) -> None:
        self._form = form
        self._index = {gen: i for i, gen in enumerate(gens)}
        self._prefixes = prefixes
        self._includes_usage = includes_usage
        self._results: dict[int, NodeResult] = {}
        self.has_begun = False

    async def lines(self, run: ServerRun, keep_alive_s: float) -> AsyncIterator[bytes]:
        """Yield the stream; raises UmbelError for what fails, also before the first line."""
        async for events in run.events(keep_alive_s):
            made: list[Json] = []
            errors: dict[int, WireError] = {}
            for event in events:
                match event:
                    case TextDelta(node=node, text=text) if node in self._index:
                        made += self._begin()
                        if not self._form.echoes_only:
                            made.append(self._form.delta(self._index[node], text))
                    case NodeFinished(node=node, result=result) if node in self._index:
                        made += self._begin()
                        self._results[node] = result
                        at = self._index[node]
                        made.append(self._form.last(at, result, self._prefixes[at]))
                    case NodeFailed(node=node, error=error):
                        errors[node] = error
            if made:
                yield b"".join(map(_line, made))
            elif not events and self.has_begun:
                yield b": still running\n\n"
            if errors:
                raise _first_cause(errors)
        if self._includes_usage:
            yield _line(self._form.usage([self._results[gen] for gen in self._index]))
        yield _DONE

    def _begin(self) -> list[Json]:
        if self.has_begun:
            return []
        self.has_begun = True
        made = [self._form.first(i, prefix) for i, prefix in enumerate(self._prefixes)]
        return [chunk for chunk in made if chunk is not None]


class _ChunkStream(EventStream):
    """A run's chunks as they come; what fails before the first one has a status of its own."""

    def __init__(
        self, programs: ProgramsApi, run: ServerRun, chunks: _Chunks, keep_alive_s: float
    ) -> None:
        super().__init__()
        self._programs = programs
        self._run = run
        self._chunks = chunks
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._programs.running(self._run, ""):
            failure = await unless_gone(receive, self._send(send))
        if failure is not None:
            await failure(scope, receive, send)

    async def _send(self, send: Send) -> Response | None:
        """Send the stream; return the response in its place when it never began."""
        is_started = False

        async def body(data: bytes, more: bool) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for line in self._chunks.lines(self._run, self._keep_alive_s):
                if not is_started:
                    is_started = True
                    start = {"status": 200, "headers": self.raw_headers}
                    await send({"type": "http.response.start", **start})
                await body(line, True)
        except UmbelError as error:
            if not is_started:
                return _error_response(error)
            await body(_line(error_json(error)[1]), True)
        await body(b"", False)
        return None


def _first_cause(errors: dict[int, WireError]) -> UmbelError:
    """Return what went wrong first; a failed turn poisons the nodes after it."""
    found = from_wire(errors[min(errors)])
    cause = found.__cause__
    return cause if isinstance(cause, UmbelError) else found


def _line(chunk: Json) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _json_response(body: Json) -> Response:
    return Response(msgspec.json.encode(body), media_type=JSON)


def _error_response(error: UmbelError) -> Response:
    status, body = error_json(error)
    return Response(msgspec.json.encode(body), status_code=status, media_type=JSON)
