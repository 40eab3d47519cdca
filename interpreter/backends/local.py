"""The co-located runtime: hands whole graphs to an engine, in this process or in one beside it.

The only file of the interpreter that may import the runtime.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Self, get_args

from umbel.lang.ir import SelectMethod
from umbel.lang.results import RunOptions
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.engine_process import EngineClient
from umbel.runtime.engine_session import EngineSession

from .base import Capabilities, EventSink
from .own_process import OwnProcess


class LocalBackend:
    """Runs graphs on an engine of this machine; closing the backend closes the engine."""

    name = "local"
    capabilities = Capabilities(
        token_native=True,
        regex=True,
        json_schema=True,
        grammar=True,
        choices=True,
        select_methods=frozenset(get_args(SelectMethod)),
        logprobs=True,
        heal=True,
        thinking=True,
        prompt_logprobs=True,
        seed=True,
        stop_regex=True,
        trunks=True,
    )

    def __init__(self, engine: Engine | EngineClient) -> None:
        self.engine = engine
        self._process = OwnProcess(self.name)

    @classmethod
    def from_model(cls, ref: str, **options: Any) -> Self:
        """Load a model and start its engine; options are the fields of EngineConfig.

        With `process` the engine has a process of its own. Raises ModelLoadError,
        EngineConfigError.
        """
        kind = EngineClient if options.get("process", False) else Engine
        return cls(kind.from_model(ref, **options))

    @staticmethod
    def option_names() -> frozenset[str]:
        """Return the names of the options that `from_model` takes."""
        return frozenset(field.name for field in dataclasses.fields(EngineConfig))

    def open(self, options: RunOptions, sink: EventSink) -> EngineSession:
        """Start a run; its events go to `sink` on the engine's thread.

        Raises BackendError in a fork of the engine's process.
        """
        self._process.check()
        return self.engine.open(options, sink)

    def token_counter(self, text: str) -> int:
        """Return how many tokens a literal text has by itself."""
        return self.engine.count_tokens(text)

    def stats(self) -> dict[str, float]:
        """Return the engine's counters; see Engine.stats."""
        return self.engine.stats()

    def reset_cache(self) -> int:
        """Forget every cached prefix and return how many slots came free.

        Raises EngineError while requests are running, EngineStoppedError.
        """
        return self.engine.reset_cache()

    def close(self, drain: float = 0.0) -> None:
        """Stop the engine; runs have `drain` seconds to end, and no new ones are taken meanwhile.

        Nodes that have not ended then fail with EngineStoppedError. Idempotent.
        """
        self.engine.close(drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
