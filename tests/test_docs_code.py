"""Every Python block of the documentation runs, on a backend that answers from no model.

The blocks of a page are one program, in their order. One that needs more is not run, only compiled;
the comment before it says why: `<!-- not run: the reason -->`.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import umbel as ub
from umbel.interpreter.backends.scripted import ScriptedBackend

DOCS = Path(__file__).resolve().parent.parent / "docs"

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```python\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """One block of code: where it starts, and why it is not run, if it is not."""

    line: int  # of its first line of code
    code: str
    reason: str | None


def blocks_of(text: str) -> list[Block]:
    return [
        Block(text[: found.start("code")].count("\n") + 1, found["code"], found["reason"])
        for found in _BLOCK.finditer(text)
    ]


PAGES = {
    str(path.relative_to(DOCS)): path
    for path in sorted(DOCS.rglob("*.md"))
    if blocks_of(path.read_text())
}


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Take back what a page sets for all: other tests look at what is logged."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("umbel.")]
    levels = {name: logging.getLogger(name).level for name in ("umbel.programs", *names)}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ModuleType("docs_page")
    monkeypatch.setitem(sys.modules, page.__name__, page)  # types are looked up by module
    with ScriptedBackend() as backend, ub.use_backend(backend):
        for block in blocks_of(PAGES[name].read_text()):
            # the blank lines let a traceback show the line in the page
            source = "\n" * (block.line - 1) + block.code
            compiled = compile(source, PAGES[name], "exec", dont_inherit=True)
            if block.reason is None:
                exec(compiled, vars(page))


def test_every_block_is_found() -> None:
    text = "a\n```python\nx = 1\n```\n\n<!-- not run: slow -->\n```python\ny = 2\nz = 3\n```\n"
    assert blocks_of(text) == [Block(3, "x = 1\n", None), Block(8, "y = 2\nz = 3\n", "slow")]
    for path in PAGES.values():
        page = path.read_text()
        assert len(blocks_of(page)) == len(re.findall(r"^\s*```py", page, re.MULTILINE)), path
