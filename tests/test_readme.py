"""The documents name files, commands and programs that exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import msgspec
import pytest

import umbel
from umbel.cli import make_parser
from umbel.lang.wire import JSON, decode_request

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/README.md", "docs/server.md"]
README = (ROOT / "README.md").read_text()


def _links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_linked_files_exist(name: str) -> None:
    document = ROOT / name
    missing = [x for x in _links(document.read_text()) if not (document.parent / x).exists()]
    assert missing == []


def test_the_life_of_one_gen_has_nine_steps_each_with_its_files() -> None:
    life = README.split("## Life of one gen")[1].split("\n## ")[0]
    steps = re.split(r"^(\d)\. ", life, flags=re.MULTILINE)[1:]
    assert steps[::2] == [str(i) for i in range(1, 10)]
    assert all(_links(step) for step in steps[1::2])


def test_the_make_targets_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^make ([a-z]+)", "\n".join(_blocks(README, "sh")), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_the_commands_it_shows_are_understood() -> None:
    lines = "\n".join(_blocks(README, "sh")).splitlines()
    commands = [line.removesuffix(" &").split() for line in lines if line.startswith("umbel ")]
    assert {command[1] for command in commands} == {"pull", "run", "serve"}
    parser = make_parser(with_engine=True)
    for command in commands:
        shell_words = " ".join(command[1:]).replace('"I was charged twice!"', "text").split()
        assert parser.parse_args(shell_words).command


def test_the_first_program_uses_public_names() -> None:
    (program,) = _blocks(README, "python")
    used = {
        node.attr
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "ub"
    }
    assert {"connect", "function", "gen", "select"} <= used <= set(umbel.__all__)


def test_the_graph_in_the_server_document_is_one() -> None:
    (body,) = _blocks((ROOT / "docs/server.md").read_text(), "json")
    request = decode_request(json.dumps(json.loads(body)).encode(), JSON)
    assert request.options.seed == 1
    assert msgspec.to_builtins(request.graph.nodes[1].op)["name"] == "city"


def test_the_changelog_has_an_unreleased_part() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
