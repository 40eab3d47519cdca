"""SGLang's backends and global settings: which there are, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import umbel as ub
import umbel.interpreter.compat.sglang as sgl
from umbel.interpreter.backends.scripted import ScriptedBackend

from .conftest import run

MakeBackend = Callable[..., ScriptedBackend]
DOWN = ub.BackendError("down", backend="scripted")


def test_the_default_backend_is_set_and_tells_about_itself() -> None:
    with ScriptedBackend({"a": "x"}) as backend:
        ub.set_default_backend(None)
        assert sgl.get_server_info() is None
        assert sgl.flush_cache() is False
        sgl.set_default_backend(backend)
        try:
            assert sgl.get_server_info() == {"backend": "scripted"}
            with pytest.raises(ub.UnsupportedFeatureError, match="prefix_cache=False"):
                sgl.flush_cache()
            assert run(lambda s: s.__iadd__(sgl.gen("a")))["a"] == "x"
        finally:
            ub.set_default_backend(None)


@pytest.mark.parametrize("make", [sgl.Anthropic, sgl.LiteLLM, sgl.VertexAI])
def test_services_without_a_backend_are_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ub.UnsupportedFeatureError, match="can't honour programs"):
        make("model")


def test_sglangs_engine_is_no_backend() -> None:
    runtime = object.__new__(sgl.Runtime)
    refused: list[Any] = [
        lambda: sgl.Engine(model_path="m"),
        lambda: sgl.ServerArgs(model_path="m"),
        lambda: runtime.generate("text"),
        lambda: runtime.async_generate("text"),
        lambda: runtime.encode("text"),
    ]
    for make in refused:
        with pytest.raises(ub.ProgramError, match=r"no part of the language.*Runtime"):
            make()


def test_the_global_settings_are_one() -> None:
    with ScriptedBackend() as backend:
        sgl.global_config.default_backend = backend
        try:
            assert sgl.global_config.default_backend is backend
            assert sgl.get_server_info() == {"backend": "scripted"}
        finally:
            sgl.global_config.default_backend = None
    with pytest.raises(ub.ProgramError, match=r"verbosity = 2: .*Runtime"):
        sgl.global_config.verbosity = 2
    with pytest.raises(AttributeError, match="enable_parallel_encoding"):
        sgl.global_config.enable_parallel_encoding  # noqa: B018


@pytest.mark.parametrize(
    ("model", "options", "endpoint"),
    [
        ("gpt-4.1-mini", {}, "chat"),
        ("gpt-3.5-turbo-instruct", {}, "completions"),
        ("gpt-3.5-turbo-instruct", {"is_chat_model": True}, "chat"),
        ("mine", {"is_chat_model": False, "base_url": "http://127.0.0.1:9/v1"}, "completions"),
    ],
)
def test_openai_asks_the_endpoint_that_sglang_asks(
    model: str, options: dict[str, Any], endpoint: str
) -> None:
    backend = sgl.OpenAI(model, api_key="sk-secret-0123456789", timeout=1.0, **options)
    try:
        assert backend.is_chat_model == (endpoint == "chat")
        assert f"endpoint={endpoint!r}" in repr(backend)
        assert "secret" not in repr(backend)
        assert backend.capabilities.regex is False
        assert backend.get_server_info()["backend"] == "openai"
        with pytest.raises(ub.UnsupportedFeatureError, match="flush_cache"):
            sgl.flush_cache(backend)
    finally:
        backend.shutdown()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"is_azure": True}, "is_azure.*base_url"),
        ({"chat_template": object()}, "chat_template.*leave it out"),
        ({"organization": "org"}, "organization.*api_key, base_url"),
        ({"default_headers": {"x": "y"}}, "default_headers"),
    ],
)
def test_openai_refuses_what_would_be_ignored(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ub.UnsupportedFeatureError, match=words):
        sgl.OpenAI("gpt-4.1-mini", api_key="k", **options)


def test_openai_wants_a_key_and_an_address_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ub.ProgramError, match="OPENAI_API_KEY"):
        sgl.OpenAI("gpt-4.1-mini")
    with pytest.raises(ub.ProgramError, match="api_key"):
        sgl.OpenAI("m", base_url="https://user:hunter2@example.org/v1")


def test_an_endpoint_takes_nothing_that_it_would_ignore() -> None:
    with pytest.raises(ub.UnsupportedFeatureError, match="verify"):
        sgl.RuntimeEndpoint("http://127.0.0.1:1", verify="ca.pem")
    with pytest.raises(ub.UnsupportedFeatureError, match="chat_template_name"):
        sgl.RuntimeEndpoint("http://127.0.0.1:1", chat_template_name="chatml")
    with pytest.raises(ub.BackendConnectionError):
        sgl.RuntimeEndpoint("http://127.0.0.1:1", api_key="secret")


def test_a_runtime_takes_the_server_arguments_that_an_engine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    backend = ScriptedBackend({"a": "x"})

    def connect(ref: str, **options: Any) -> ScriptedBackend:
        asked.append((ref, options))
        return backend

    monkeypatch.setattr("umbel.interpreter.compat.sglang.backends.connect", connect)
    runtime = sgl.Runtime(
        model_path="m", context_length=64, disable_radix_cache=True, tp_size=1, log_level="error"
    )
    assert asked == [("m", {"max_seq_len": 64, "prefix_cache": False})]
    assert run(lambda s: s.__iadd__(sgl.gen("a")), backend=runtime.endpoint)["a"] == "x"
    assert sgl.get_server_info(runtime) == {"backend": "scripted"}
    runtime.shutdown()
    with pytest.raises(ub.GenerationError, match="closed"):
        run(lambda s: s.__iadd__(sgl.gen("a")), backend=runtime).text()
    with pytest.raises(ub.ProgramError, match="tp_size"):
        sgl.Runtime("m", tp_size=2)
