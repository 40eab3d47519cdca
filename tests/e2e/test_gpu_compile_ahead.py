"""A first start on a GPU compiles its kernels side by side, all that small requests need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.device_programs import write_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
OURS = "umbel-compile"  # the threads that compile ahead


def start(folder: Path, how: str = "ahead", shape: str = "llama", **settings: Any) -> Any:
    """Start an engine in a process, with Triton's cache in `folder`, and let it serve."""
    settings = {"max_running": 40, "max_seq_len": 512} | settings
    run = subprocess.run(
        [
            sys.executable, "-m", "tests.support.compile_counts",
            str(write_config(shape, folder)), json.dumps(settings), how,
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ("llama", {}),
        ("qwen3", {"attention": "triton", "dtype": "float32"}),
        ("llama", {"kv_tokens": 4096, "grammar_device_states": 0}),
        ("qwen3", {"capture": False, "attention": "triton"}),
    ],
    ids=str,
)
def test_after_a_first_start_nothing_is_compiled(
    tmp_path: Path, shape: str, settings: dict[str, Any]
) -> None:
    found = start(tmp_path, shape=shape, **settings)
    assert found["load"]
    assert [name for name in found["load"] if not name.startswith(OURS)] == []
    if settings.get("capture", True):  # what is not captured has more variants than a start runs
        assert found["serve"] == []
    again = start(tmp_path, shape=shape, **settings)
    assert again["load"] == []


def test_compiling_ahead_changes_no_id(tmp_path: Path) -> None:
    settings = {"dtype": "float32", "attention": "triton"}
    ahead, launched = tmp_path / "ahead", tmp_path / "launched"
    ahead.mkdir()
    launched.mkdir()
    found, expected = start(ahead, **settings), start(launched, "launched", **settings)
    assert expected["load"]
    assert not any(name.startswith(OURS) for name in expected["load"])
    assert found["ids"] == expected["ids"]
