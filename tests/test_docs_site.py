"""The documentation's site has every page, and keeps the links that lead somewhere in it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def test_the_navigation_lists_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    pages = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == sorted(pages)


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("outside_links", DOCS / "outside_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("forks.md", "a [b.py](../lang/fork.py#L3) c", "a b.py c"),
        ("forks.md", "[one](../lang), [two](../README.md)", "one, two"),
        ("forks.md", "[x](../lang/no_such_file.py)", "[x](../lang/no_such_file.py)"),
        (
            "forks.md",
            "[x](select.md) [y](https://a.b/../c)",
            "[x](select.md) [y](https://a.b/../c)",
        ),
        ("reference/engine.md", "[x](../engine.md)", "[x](../engine.md)"),
        ("reference/engine.md", "[x](../../lang)", "x"),
    ],
)
def test_links_out_of_the_documentation_become_text(
    hook: ModuleType, page: str, text: str, shown: str
) -> None:
    site_page = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert hook.on_page_markdown(text, page=site_page, config=None, files=None) == shown
