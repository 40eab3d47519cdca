"""One table chooses the kernels: by device, and attention by name and shape too."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from tests.kernels import fake_flashinfer

from umbel.kernels import (
    AttentionShape,
    attention_backend,
    decode_plan,
    dispatch,
    ops_for,
)
from umbel.kernels.dispatch import ATTENTION, HOPPER_ATTENTION, attention_choice
from umbel.kernels.torch_attention import TorchAttention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = AttentionShape(8, 2, 128, torch.bfloat16, CUDA)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    caches = dispatch.has_triton, dispatch.ops_for, dispatch.attention_choice
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def ours() -> Iterator[ModuleType]:
    """Our module, where FlashInfer is installed."""
    pytest.importorskip("triton")
    with fake_flashinfer.installed() as module:
        yield module


def set_capability(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


def leave_out(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec

    def without(name: str, anchor: str | None = None) -> ModuleSpec | None:
        return None if name == package else find(name, anchor)

    monkeypatch.setattr(importlib.util, "find_spec", without)


def test_a_cpu_takes_torch_and_packed_weights() -> None:
    assert attention_choice("auto", replace(SHAPE, device=CPU)) is ATTENTION["torch"]
    assert ops_for(CPU).rms_norm is dispatch.REFERENCE.rms_norm
    assert ops_for(CPU).linear is not dispatch.REFERENCE.linear


def test_a_gpu_takes_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from umbel.kernels import triton as kernels

    leave_out(monkeypatch, "flashinfer")
    assert attention_choice("auto", SHAPE) is ATTENTION["triton"]
    assert ops_for(CUDA).silu_and_mul is kernels.silu_and_mul
    assert isinstance(attention_backend("triton", SHAPE), kernels.TritonAttention)


def test_a_gpu_without_triton_takes_torch_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave_out(monkeypatch, "triton")
    with caplog.at_level(logging.WARNING):
        assert isinstance(attention_backend("auto", SHAPE), TorchAttention)
        assert ops_for(CUDA) is dispatch.REFERENCE
    assert [record.message for record in caplog.records] == [
        "triton is not installed: the GPU runs plain torch, which is slower"
    ]


@pytest.mark.usefixtures("ours")
def test_hopper_takes_flashinfer_for_long_extends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_loads_flashinfer", lambda shape: True)
    set_capability(monkeypatch, 8, 0)
    assert attention_choice("auto", SHAPE) is ATTENTION["triton"]
    dispatch.attention_choice.cache_clear()
    set_capability(monkeypatch, 9, 0)
    assert attention_choice("auto", SHAPE) is HOPPER_ATTENTION
    for other in (replace(SHAPE, head_dim=80), replace(SHAPE, dtype=torch.float32)):
        assert attention_choice("auto", other) is ATTENTION["triton"]
    assert attention_choice("triton", SHAPE) is ATTENTION["triton"]
    assert type(attention_backend("auto", SHAPE)).__name__ == "FlashInferAttention"


def test_hopper_takes_triton_where_flashinfer_does_not_load(
    ours: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_capability(monkeypatch, 9, 0)

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("no nvcc")

    monkeypatch.setattr(ours, "_workspace", fail)
    assert attention_choice("auto", SHAPE) is ATTENTION["triton"]
    assert [record.message for record in caplog.records] == [
        "attention runs on triton alone: FlashInfer does not load here: no nvcc"
    ]


@pytest.mark.parametrize(
    ("shape", "usual", "lack"),
    [
        (replace(SHAPE, device=CPU), "torch", "it needs a GPU"),
        (replace(SHAPE, dtype=torch.float32), "triton", "it has no kernels for float32"),
        (replace(SHAPE, head_dim=80), "triton", "it has no kernels for heads of 80"),
    ],
)
@pytest.mark.usefixtures("ours")
def test_what_flashinfer_lacks_is_said_once(
    shape: AttentionShape, usual: str, lack: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert attention_choice("flashinfer", shape) is ATTENTION[usual]
    assert [record.message for record in caplog.records] == [
        f"attention runs on {usual}, not on FlashInfer: {lack}"
    ]


def test_a_missing_flashinfer_is_said_once_and_only_to_who_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    leave_out(monkeypatch, "flashinfer")
    assert attention_choice("auto", SHAPE) is ATTENTION["triton"]
    assert not caplog.records
    for _ in range(2):
        assert attention_choice("flashinfer", SHAPE) is ATTENTION["triton"]
    assert [record.message for record in caplog.records] == [
        "attention runs on triton, not on FlashInfer: it is not installed "
        "(pip install 'umbel[flashinfer]')"
    ]


@pytest.mark.usefixtures("ours")
def test_captured_decodes_are_whose_decodes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPE, device=CPU)
    for name in ("torch", "triton", "auto"):
        assert type(decode_plan(shape, [1, 2], 9, name)).__name__ == "DecodeAttention"
    monkeypatch.setattr(dispatch, "_flashinfer_lacks", lambda shape: None)
    assert type(decode_plan(shape, [1, 2], 9, "flashinfer")).__name__ == "FlashInferDecode"
