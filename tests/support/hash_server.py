"""A real server on loopback whose engine is real and whose model is a hash of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from umbel.interpreter.backends.local import LocalBackend
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.server import BackgroundServer, create_app

from .engine_harness import GRAMMAR, TOKENIZER, make_runner

MODEL = "hash"
MAX_SEQ_LEN = 512


@dataclass(frozen=True)
class HashServer:
    url: str
    local: LocalBackend  # the same engine, without HTTP

    @property
    def openai_url(self) -> str:
        return self.url + "/v1"


@contextmanager
def hash_server(
    poison: Callable[[Sequence[int]], bool] | None = None,
) -> Iterator[HashServer]:
    """`poison` names the prefixes at which the model fails."""
    config = EngineConfig(max_running=8, max_step_tokens=64)
    runner = make_runner(poison=poison)
    engine = Engine(runner, TOKENIZER, config, max_seq_len=MAX_SEQ_LEN, grammar=GRAMMAR)
    app = create_app(
        engine,
        model_name=MODEL,
        capabilities=msgspec.to_builtins(LocalBackend.capabilities),
        token_bytes=TOKENIZER.token_bytes,
        keep_alive_s=0.05,
    )
    with LocalBackend(engine) as local, BackgroundServer(app) as server:
        yield HashServer(server.url, local)
