"""SGLang's backends by name, as umbel's; loads none before it is asked for."""

from __future__ import annotations

from typing import Any, NoReturn

from umbel.lang.errors import ProgramError, UnsupportedFeatureError
from umbel.lang.results import RunOptions
from umbel.lang.runner import current_runner

from ...backends.base import Backend, EventSink, Session
from ...connect import connect
from ...current import set_default_backend as _set_default_backend
from ...interpreter import Interpreter

#: SGLang's server arguments -> the engine's settings
_ENGINE = {
    "chunked_prefill_size": "max_step_tokens",
    "context_length": "max_seq_len",
    "device": "device",
    "dtype": "dtype",
    "max_running_requests": "max_running",
    "max_total_tokens": "kv_tokens",
    "schedule_policy": "policy",
}
#: settings of a server process; an engine in this process has none
_OF_A_SERVER = frozenset({"host", "launch_timeout", "log_level", "port"})


class Runtime:
    """A model that runs in this process; a backend.

    `options` are SGLang's server arguments, as far as an engine of umbel has them; others are
    refused. Raises ModelLoadError, EngineConfigError.
    """

    def __init__(self, model_path: str, **options: Any) -> None:
        self._backend = connect(model_path, **_engine_options(options))
        self.name = self._backend.name
        self.capabilities = self._backend.capabilities

    @property
    def endpoint(self) -> Runtime:
        """The backend itself: there is no server in between."""
        return self

    def open(self, options: RunOptions, sink: EventSink) -> Session:
        """Start a run; its events go to `sink`."""
        return self._backend.open(options, sink)

    def stats(self) -> dict[str, float]:
        """Return the engine's counters."""
        return dict(self._backend.stats())

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._backend.close()

    def shutdown(self) -> None:
        """Stop the engine. Idempotent."""
        self.close()


def RuntimeEndpoint(
    base_url: str,
    api_key: str | None = None,
    verify: str | None = None,
    chat_template_name: str | None = None,
) -> Backend:
    """Return the backend of an umbel server (`umbel serve`); SGLang's own servers are no backends.

    Raises UnsupportedFeatureError for a key, a certificate or a template: an umbel server has no
    authentication, and renders turns with its model's template.
    """
    given = {"api_key": api_key, "verify": verify, "chat_template_name": chat_template_name}
    for name, value in given.items():
        if value is not None:
            raise UnsupportedFeatureError(
                backend="remote", feature=name, hint="leave it out; see docs/server.md"
            )
    return connect(base_url)


def OpenAI(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: umbel has no backend for OpenAI-compatible endpoints yet."""
    _refuse("openai")


def Anthropic(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: umbel has no backend for Anthropic's API."""
    _refuse("anthropic")


def LiteLLM(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: umbel has no backend for LiteLLM."""
    _refuse("litellm")


def VertexAI(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: umbel has no backend for Vertex AI."""
    _refuse("vertexai")


def set_default_backend(backend: Backend) -> None:
    """Set the backend of every thread and task that has not chosen one."""
    _set_default_backend(backend)


def get_server_info(backend: Backend | None = None) -> dict[str, Any] | None:
    """Return a backend's name and counters; None where there is no backend."""
    found = backend or _default()
    return None if found is None else {"backend": found.name, **found.stats()}


def flush_cache(backend: Backend | None = None, empty_cache: bool = True) -> bool:
    """Return False where there is no backend.

    Raises UnsupportedFeatureError otherwise: the cache is verified token by token and holds nothing
    stale, and what would measure a cold one must not measure a warm one instead.
    """
    found = backend or _default()
    if found is None:
        return False
    raise UnsupportedFeatureError(
        backend=found.name,
        feature="flush_cache",
        hint="to measure without a cache, start the engine with prefix_cache=False",
    )


def _default() -> Backend | None:
    runner = current_runner()
    return runner.backend if isinstance(runner, Interpreter) else None


def _engine_options(options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in options.items():
        if name in _ENGINE:
            found[_ENGINE[name]] = value
        elif name == "disable_radix_cache":
            found["prefix_cache"] = not value
        elif name == "tp_size" and value == 1:
            continue
        elif name not in _OF_A_SERVER:
            known = ", ".join(sorted((*_ENGINE, "disable_radix_cache")))
            raise ProgramError(f"Runtime has no option {name}={value!r}; it has {known}")
    return found


def _refuse(service: str) -> NoReturn:
    raise UnsupportedFeatureError(
        backend=service,
        feature="programs",
        hint="use Runtime(model_path=...), or RuntimeEndpoint(url) of an umbel server",
    )
