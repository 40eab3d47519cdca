"""`connect` imports what is asked for and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import umbel as ub


def loaded_by(code: str) -> set[str]:
    """Return the packages that a fresh interpreter holds after running `code`."""
    code += "\nimport sys; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_programs_on_a_scripted_backend_need_no_third_party_package() -> None:
    code = """
import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend

@ub.function
def program(s):
    s += ub.user("x") + ub.gen("v", schema=list[int])
    s.fork(2).join()

with ScriptedBackend() as backend, ub.use_backend(backend):
    program.run_batch([(), ()], progress=False)
    list(program.stream())
"""
    assert loaded_by(code) & {"torch", "pydantic", "httpx", "tqdm", "numpy", "fastapi"} == set()


def test_a_servers_url_needs_no_torch() -> None:
    code = """
import contextlib, umbel as ub
with contextlib.suppress(ub.BackendError):  # nobody listens there
    ub.connect("http://127.0.0.1:9/").close()
"""
    assert loaded_by(code) & {"torch", "transformers", "fastapi"} == set()


@pytest.mark.parametrize("ref", ["no-such-model-at-all.gguf"])
def test_an_unknown_model_is_said_so(ref: str) -> None:
    with pytest.raises(ub.ModelLoadError, match=ref):
        ub.connect(ref)


def test_a_path_is_a_reference_and_a_number_none(tmp_path: Path) -> None:
    (tmp_path / "model.txt").write_text("")
    with pytest.raises(ub.ModelLoadError, match=r"model\.txt is no \.gguf file"):
        ub.connect(tmp_path / "model.txt")
    wrong: Any = 3
    with pytest.raises(TypeError, match="a model's name or path, or a URL, not 3"):
        ub.connect(wrong)


@pytest.mark.parametrize("ref", ["", " "])
def test_an_empty_name_is_no_folder(ref: str) -> None:
    with pytest.raises(ub.ModelLoadError, match="no model is named"):
        ub.connect(ref)


@pytest.mark.parametrize(
    ("ref", "name", "words"),
    [
        ("smollm2", "num_thread", "did you mean 'num_threads'?"),
        ("smollm2", "kv_token", "did you mean 'kv_tokens'?"),
        ("http://127.0.0.1:9", "silence_timout", "did you mean 'silence_timeout'?"),
        ("http://127.0.0.1:9", "num_threads", "it takes api_key, connect_timeout, "),
    ],
)
def test_an_unknown_option_meets_the_nearest_one(ref: str, name: str, words: str) -> None:
    options = {name: 2}
    with pytest.raises(ub.EngineConfigError) as caught:
        ub.connect(ref, **options)
    assert f"has no option {name!r}" in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("ref", ["127.0.0.1:8000", "localhost:8000/", "my-host.example:80/v1"])
def test_an_address_without_its_scheme_is_told_how_to_write_it(ref: str) -> None:
    with pytest.raises(ub.EngineConfigError, match=re.escape(f"write it as 'http://{ref}'")):
        ub.connect(ref, api_key="k")
