"""What `import umbel` shows, and what it must not load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import umbel
from umbel.lang import errors

ROOT = Path(__file__).resolve().parent.parent

# A language user pays for the standard library and msgspec. Everything else comes on demand.
HEAVY = frozenset(
    {
        "anyio",
        "anthropic",
        "fastapi",
        "gguf",
        "httpx",
        "huggingface_hub",
        "jinja2",
        "jsonschema",
        "llguidance",
        "numpy",
        "openai",
        "outlines_core",
        "platformdirs",
        "prometheus_client",
        "pydantic",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "tqdm",
        "transformers",
        "triton",
        "uvicorn",
    }
)


def _loaded_by(statement: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter holds after `statement`."""
    code = f"import sys, json; before = set(sys.modules); {statement}\n"
    code += "print(json.dumps(sorted(set(sys.modules) - before)))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return {name.split(".")[0] for name in json.loads(run.stdout)}


def test_import_umbel_loads_the_standard_library_and_msgspec_only() -> None:
    loaded = _loaded_by("import umbel")
    assert loaded & HEAVY == set()
    # msgspec loads typing_extensions where it is installed, and needs it nowhere
    assert loaded - {"umbel", "msgspec", "typing_extensions"} - sys.stdlib_module_names == set()


def test_import_umbel_does_not_load_the_runtime() -> None:
    code = (
        "import sys, umbel\n"
        "print([m for m in sys.modules if m.startswith(('umbel.runtime', 'umbel.kernels'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_public_name_exists_and_the_list_is_sorted() -> None:
    kinds = {True: 0, False: 1}  # constants, classes, functions: as ruff sorts them

    def key(name: str) -> tuple[int, str]:
        return (kinds[name.isupper()] if name[0].isupper() else 2, name)

    assert list(umbel.__all__) == sorted(set(umbel.__all__), key=key)
    assert [name for name in umbel.__all__ if not hasattr(umbel, name)] == []


def test_every_imported_name_is_public() -> None:
    shown = {
        name
        for name, value in vars(umbel).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    wiring = {"Interpreter", "set_default_runner"}  # how programs come to their runner
    assert shown - set(umbel.__all__) - wiring == set()


def test_every_error_of_the_tree_is_public_and_drawn_in_it() -> None:
    tree = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.UmbelError)
    ]
    assert set(tree) <= set(umbel.__all__)
    drawn = set((errors.__doc__ or "").split("`to_wire`")[0].split())
    assert set(tree) <= drawn
    reference = (ROOT / "docs" / "reference" / "errors.md").read_text()
    assert [name for name in tree if f"::: umbel.{name}\n" not in reference] == []


def test_the_words_of_the_language_are_there() -> None:
    words = {"assistant", "connect", "function", "gen", "select", "system", "user"}
    assert words <= set(umbel.__all__)
