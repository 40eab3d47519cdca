"""What all tests share: the real small model, hypothesis profiles, marks that need a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Without a GPU, Triton's interpreter runs the kernels. Triton reads this once, when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `--hypothesis-profile=ci` asks for thousands of examples; by default a test stays quick.
settings.register_profile(
    "dev", max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "ci", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# `--hypothesis-profile=long` asks the whole engine's state machine for all that was promised, once.
settings.register_profile("long", settings.get_profile("ci"))
settings.load_profile("dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none; torch is imported only to find out."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Return the real small model's GGUF file; the first time it is pulled."""
    from umbel.runtime.model_store import pull

    return pull("smollm2")
