"""SGLang's backends by name, as umbel's; loads none before it is asked for."""

from __future__ import annotations

from typing import Any, NoReturn

from umbel.lang.errors import (
    EngineError,
    EngineStoppedError,
    ProgramError,
    UnsupportedFeatureError,
)
from umbel.lang.results import RunOptions
from umbel.lang.runner import current_runner

from ...backends.base import Backend, CacheOwner, EventSink, Session
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


class WrappedBackend:
    """One of umbel's backends under SGLang's names for it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.name = backend.name
        self.capabilities = backend.capabilities
        self.token_counter = backend.token_counter

    def open(self, options: RunOptions, sink: EventSink) -> Session:
        """Start a run; its events go to `sink`."""
        return self._backend.open(options, sink)

    def stats(self) -> dict[str, float]:
        """Return the backend's counters."""
        return dict(self._backend.stats())

    def close(self) -> None:
        """Stop: what has not ended fails. Idempotent."""
        self._backend.close()

    def shutdown(self) -> None:
        """Stop: what has not ended fails. Idempotent."""
        self.close()

    def get_server_info(self) -> dict[str, Any]:
        """Return the backend's name and counters."""
        return {"backend": self.name, **self.stats()}

    def flush_cache(self) -> bool:
        """Forget every cached prefix; see the function of this name."""
        return _flush(self._backend)

    def cache_prefix(self, prefix_str: str) -> None:
        """Do nothing: a run finds what earlier runs, and runs beside it, computed of its prefix."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._backend!r})"


class Runtime(WrappedBackend):
    """A model that runs in this process; a backend.

    `options` are SGLang's server arguments, as far as an engine of umbel has them; others are
    refused. Raises ModelLoadError, EngineConfigError.
    """

    def __init__(self, model_path: str, **options: Any) -> None:
        super().__init__(connect(model_path, **_engine_options(options)))

    @property
    def endpoint(self) -> Runtime:
        """The backend itself: there is no server in between."""
        return self

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a program is what runs here."""
        _refuse_engine("Runtime.generate")

    def async_generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a program is what runs here."""
        _refuse_engine("Runtime.async_generate")

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: there are no embedding models."""
        _refuse_engine("Runtime.encode")


class RuntimeEndpoint(WrappedBackend):
    """An umbel server (`umbel serve`) as a backend; SGLang's own servers are none.

    Raises UnsupportedFeatureError for a certificate or a template: an umbel server renders turns
    with its model's. Raises BackendConnectionError where nothing answers.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        given = {"verify": verify, "chat_template_name": chat_template_name}
        for name, value in given.items():
            if value is not None:
                raise UnsupportedFeatureError(
                    backend="remote", feature=name, hint="leave it out; see docs/server.md"
                )
        options = {} if api_key is None else {"api_key": api_key}
        super().__init__(connect(base_url, **options))
        self.base_url = base_url


class GlobalConfig:
    """SGLang's global settings, of which there is one here: the default backend."""

    @property
    def default_backend(self) -> Backend | None:
        """The backend of programs that are given none."""
        return _default()

    @default_backend.setter
    def default_backend(self, backend: Backend | None) -> None:
        _set_default_backend(backend)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"global_config.{name}: umbel has no such setting", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "default_backend":
            raise ProgramError(
                f"global_config.{name} = {value!r}: umbel has no such setting; settings of the "
                "engine are arguments of Runtime, sampling options arguments of a run or a gen"
            )
        super().__setattr__(name, value)


global_config = GlobalConfig()


def Anthropic(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: umbel has no backend for Anthropic's API."""
    _refuse("anthropic")


def LiteLLM(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: umbel has no backend for LiteLLM."""
    _refuse("litellm")


def VertexAI(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: umbel has no backend for Vertex AI."""
    _refuse("vertexai")


def Engine(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: SGLang's offline engine takes prompts, not programs."""
    _refuse_engine("Engine")


def ServerArgs(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse: they are SGLang's server's."""
    _refuse_engine("ServerArgs")


def set_default_backend(backend: Backend) -> None:
    """Set the backend of every thread and task that has not chosen one."""
    _set_default_backend(backend)


def get_server_info(backend: Backend | None = None) -> dict[str, Any] | None:
    """Return a backend's name and counters; None where there is no backend."""
    found = backend or _default()
    return None if found is None else {"backend": found.name, **found.stats()}


def flush_cache(backend: Backend | None = None, empty_cache: bool = True) -> bool:
    """Forget every cached prefix of a model in this process, and return True.

    False where there is no backend, or where requests are running, as SGLang's server answers
    then. Raises UnsupportedFeatureError on other backends: what would measure a cold cache must
    not measure a warm one instead.
    """
    found = backend or _default()
    return False if found is None else _flush(found)


def _flush(backend: Backend) -> bool:
    if isinstance(backend, WrappedBackend):
        return backend.flush_cache()
    if not isinstance(backend, CacheOwner):
        raise UnsupportedFeatureError(
            backend=backend.name,
            feature="flush_cache",
            hint="only the process of the engine can; to measure without a cache, start the "
            "engine with prefix_cache=False",
        )
    try:
        backend.reset_cache()
    except EngineStoppedError:
        raise
    except EngineError:  # something is running
        return False
    return True


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
        hint="use Runtime(model_path=...), RuntimeEndpoint(url) of an umbel server, or "
        "OpenAI(model, base_url=...) where the service has an OpenAI-compatible endpoint",
    )


def _refuse_engine(name: str) -> NoReturn:
    raise ProgramError(
        f"{name} is no part of the language: write a program with gen(), and run it on "
        "Runtime(model_path=...); umbel.runtime.engine.Engine is the engine itself"
    )
