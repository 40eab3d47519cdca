"""From a reference to an engine's parts: what does not fit together is refused in one sentence."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_config import tiny_llama

from umbel.lang.errors import EngineConfigError, ModelLoadError
from umbel.runtime import model_loading
from umbel.runtime.config import EngineConfig
from umbel.runtime.engine import Engine
from umbel.runtime.model_loading import load_parts
from umbel.runtime.models import load_dummy_model

BYTES_PER_TOKEN = 2 * 2 * 1 * 16 * 4  # K and V, layers, heads, head_dim, float32


@pytest.fixture
def ref(tmp_path: Path) -> str:
    return tiny_llama(tmp_path)


def test_the_pool_and_the_row_are_as_large_as_was_asked(ref: str) -> None:
    parts = load_parts(ref, EngineConfig(device="cpu", kv_tokens=77, max_seq_len=64))
    assert (parts.runner.num_slots, parts.max_seq_len) == (77, 64)
    assert parts.runner.vocab_size == parts.tokenizer.vocab_size == 320


def test_the_log_says_what_loading_is_at(ref: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "umbel.runtime")
    engine = Engine.from_model(ref, device="cpu", max_running=3)
    engine._grammar.warm_up().result()
    engine.close()
    told = "\n".join(record.getMessage() for record in caplog.records)
    steps = [
        f"loading dummy-config from {ref.removeprefix('dummy:')}",
        "dummy-config is on cpu in float32 after",
        "KV pool: 384 tokens",
        "dummy-config is ready after",
        "constraints can be compiled after",
    ]
    places = [told.find(step) for step in steps]
    assert -1 not in places, told
    assert places == sorted(places), told


def test_a_template_of_the_user_s_replaces_the_model_s(ref: str, tmp_path: Path) -> None:
    own = tmp_path / "template.jinja"
    own.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}")
    parts = load_parts(ref, EngineConfig(device="cpu", kv_tokens=77, template=str(own)))
    template = parts.tokenizer.chat_template
    assert template is not None
    assert template.start((), "user") == "[user]"


def test_a_template_that_is_not_there_is_named(ref: str, tmp_path: Path) -> None:
    with pytest.raises(EngineConfigError, match=r"template must be .*nowhere"):
        load_parts(ref, EngineConfig(device="cpu", template=str(tmp_path / "nowhere")))


def test_a_row_is_as_long_as_the_model_s_context_by_default(ref: str) -> None:
    assert load_parts(ref, EngineConfig(device="cpu", kv_tokens=77)).max_seq_len == 128


def test_the_measured_pool_holds_no_more_than_can_run(ref: str) -> None:
    parts = load_parts(ref, EngineConfig(device="cpu", max_running=3))
    assert parts.runner.num_slots == 3 * 128


def test_the_measured_pool_takes_its_share_of_what_is_left(
    ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loading, "_available_bytes", lambda _: 100 * BYTES_PER_TOKEN)
    monkeypatch.setattr(model_loading, "_peak_bytes", lambda *_: 20 * BYTES_PER_TOKEN)
    config = EngineConfig(device="cpu", kv_memory_fraction=0.5)
    assert load_parts(ref, config).runner.num_slots == 40


def test_no_room_for_a_pool_is_said(ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loading, "_available_bytes", lambda _: BYTES_PER_TOKEN)
    with pytest.raises(EngineConfigError, match="no room for a KV pool"):
        load_parts(ref, EngineConfig(device="cpu"))


@pytest.mark.parametrize("kv_tokens", [10**12, 10**20])
def test_a_pool_that_memory_can_not_hold_is_refused_before_it_is_made(
    ref: str, kv_tokens: int
) -> None:
    with pytest.raises(EngineConfigError, match=r"kv_tokens=[\d,]+ needs .* room for [\d,]+ tok"):
        load_parts(ref, EngineConfig(device="cpu", kv_tokens=kv_tokens))


def test_automata_have_their_room_before_a_pool_is_found_to_fit(
    ref: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [100 * BYTES_PER_TOKEN]

    def takes_room(*_: Any) -> None:
        left[0] -= 60 * BYTES_PER_TOKEN

    monkeypatch.setattr(model_loading, "_available_bytes", lambda _: left[0])
    monkeypatch.setattr(model_loading, "_device_setup", takes_room)
    with pytest.raises(EngineConfigError, match="room for 40 tokens"):
        load_parts(ref, EngineConfig(device="cpu", kv_tokens=50))


def test_rows_longer_than_the_model_s_context_are_refused(ref: str) -> None:
    with pytest.raises(EngineConfigError, match="at most 128"):
        load_parts(ref, EngineConfig(device="cpu", max_seq_len=129))


def test_a_tokenizer_of_another_model_is_refused(ref: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = load_dummy_model

    def larger(config: Any, **options: Any) -> Any:
        model = real(config, **options)
        monkeypatch.setattr(type(model.config), "vocab_size", 999)
        return model

    monkeypatch.setattr(model_loading, "load_dummy_model", larger)
    with pytest.raises(ModelLoadError, match="do not belong together"):
        load_parts(ref, EngineConfig(device="cpu", kv_tokens=8))


def test_an_unknown_setting_is_named_with_those_that_there_are() -> None:
    with pytest.raises(EngineConfigError, match=r"no setting kv_tokenz; .*kv_tokens"):
        Engine.from_model("smollm2", kv_tokenz=3)


def test_most_running_requests_cost_no_memory_beyond_a_step(ref: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "kv_tokens": 64, "max_running": 10**9}
    with_many = Engine.from_model(ref, **options)
    with_many.close()


def test_a_loaded_engine_warms_its_grammars_up(ref: str) -> None:
    def compiling() -> set[int | None]:
        return {t.ident for t in threading.enumerate() if t.name.startswith("umbel-grammar")}

    before = compiling()
    engine = Engine.from_model(ref, device="cpu", kv_tokens=64)
    try:
        assert compiling() - before
    finally:
        engine.close()
    assert compiling() <= before


@pytest.mark.parametrize(
    ("num_weights", "device", "given", "tokens"),
    [
        (600_000_000, "cuda", None, 16_384),
        (8_000_000_000, "cuda", None, 8_192),
        (600_000_000, "cpu", None, 512),
        (600_000_000, "cuda", 100, 100),
    ],
)
def test_a_pass_of_a_small_model_may_be_larger(
    num_weights: int, device: str, given: int | None, tokens: int
) -> None:
    config = EngineConfig(max_step_tokens=given).suited_to(num_weights, device)
    assert config.limits(device).max_step_tokens == tokens


def test_no_collection_looks_through_what_was_there_until_the_engine_is_closed(ref: str) -> None:
    gc.unfreeze()  # of other tests' engines
    engine = Engine.from_model(ref, device="cpu", kv_tokens=77)
    assert gc.get_freeze_count() > 10_000
    engine.close()
    assert gc.get_freeze_count() == 0
