"""The FastAPI app: lifecycle, health, metrics, errors as statuses; knows no engine's insides."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from umbel import __version__
from umbel.lang.errors import UmbelError
from umbel.lang.results import Event, RunOptions
from umbel.lang.wire import JSON, MODEL_PATH, SOCKET_VERSION, STATS_PATH, ModelInfo

from ..metrics import EngineMetrics
from .api_key import ApiKeyGate, check_key
from .host import EngineHost
from .limits import KEEP_ALIVE_S, MAX_BODY_BYTES, SocketLimits
from .openai_api import OpenAIApi
from .programs_api import ProgramsApi
from .refusal import refusal
from .routing_errors import answer_routing_error
from .service import Service
from .socket_api import SocketApi

HEALTH_PATH = "/health"


def create_app(
    engine: EngineHost,
    *,
    model_name: str,
    capabilities: Mapping[str, Any],
    token_bytes: Sequence[bytes] | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    keep_alive_s: float = KEEP_ALIVE_S,
    socket_limits: SocketLimits = SocketLimits(),  # noqa: B008  # frozen
    api_key: str | None = None,
) -> FastAPI:
    """Return the app that serves `engine`. The caller keeps the engine, and closes it afterwards.

    `capabilities` are the fields of the Capabilities that clients of this server may count on.
    `token_bytes` spells each token id, for the log-probabilities of OpenAI's routes, which are
    refused without it. A stream without an event for `keep_alive_s` seconds sends a comment, so
    that a client can tell a long wait from a dead server. `max_body_bytes` bounds a request's body
    and a socket's message; who serves the app (`server_config`) has to read as much. With an
    `api_key`, all routes but the health check want it as a bearer token.

    Raises EngineConfigError for a key that fits no header.
    """
    if api_key is not None:
        check_key(api_key)
    metrics = EngineMetrics(engine.stats)
    service = Service(engine, metrics, max_body_bytes, keep_alive_s)
    programs = ProgramsApi(service)
    openai = OpenAIApi(service, programs, model_name=model_name, token_bytes=token_bytes)
    sockets = SocketApi(service, socket_limits)
    info = ModelInfo(model_name, dict(capabilities), __version__, (SOCKET_VERSION,), max_body_bytes)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        programs.cancel_all()

    app = FastAPI(title="umbel", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(sockets.router)
    app.include_router(programs.router)
    app.include_router(openai.router)
    _add_status_routes(app, engine, metrics, info)

    @app.exception_handler(UmbelError)
    async def answer_error(_: Request, error: UmbelError) -> Response:
        return refusal(error)

    app.add_exception_handler(HTTPException, answer_routing_error)
    if api_key is not None:
        app.add_middleware(ApiKeyGate, api_key=api_key, open_paths=frozenset({HEALTH_PATH}))
    return app


def _add_status_routes(
    app: FastAPI, engine: EngineHost, metrics: EngineMetrics, info: ModelInfo
) -> None:
    """Add the routes that tell of the server and run nothing."""
    model_body = msgspec.json.encode(info)

    @app.get(MODEL_PATH)
    async def model() -> Response:
        return Response(model_body, media_type=JSON)

    @app.get(STATS_PATH)
    async def stats() -> Response:
        return Response(msgspec.json.encode(engine.stats()), media_type=JSON)

    @app.get(HEALTH_PATH)
    async def health() -> Response:
        engine.open(RunOptions(), _ignore).close()  # raises EngineStoppedError
        return Response(b'{"status":"ok"}', media_type=JSON)

    @app.get("/metrics")
    async def read_metrics() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _ignore(_: Sequence[Event]) -> None:
    pass
