"""One table chooses the kernels: by device, and attention by name."""

from __future__ import annotations

import importlib.util
import logging
from importlib.machinery import ModuleSpec

import pytest
import torch

from umbel.kernels import attention_backend, attention_for, dispatch, ops_for
from umbel.kernels.torch_attention import TorchAttention

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    dispatch.has_triton.cache_clear()
    dispatch.ops_for.cache_clear()


def test_a_cpu_takes_torch_and_packed_weights() -> None:
    assert attention_for(torch.device("cpu")) == "torch"
    assert ops_for(torch.device("cpu")).rms_norm is dispatch.REFERENCE.rms_norm
    assert ops_for(torch.device("cpu")).linear is not dispatch.REFERENCE.linear


def test_a_gpu_takes_triton() -> None:
    pytest.importorskip("triton")
    from umbel.kernels import triton as kernels

    assert attention_for(CUDA) == "triton"
    assert ops_for(CUDA).silu_and_mul is kernels.silu_and_mul
    assert isinstance(attention_backend("triton"), kernels.TritonAttention)


def test_a_gpu_without_triton_takes_torch_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "triton" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with caplog.at_level(logging.WARNING):
        assert attention_for(CUDA) == "torch"
        assert ops_for(CUDA) is dispatch.REFERENCE
    assert [record.message for record in caplog.records] == [
        "triton is not installed: the GPU runs plain torch, which is slower"
    ]
    assert isinstance(attention_backend(attention_for(CUDA)), TorchAttention)
    dispatch.has_triton.cache_clear()
    dispatch.ops_for.cache_clear()
