"""The documents name files, commands and programs that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from tests.support.fake_engine import FakeEngine

from umbel.cli import make_parser
from umbel.interpreter.backends.local import LocalBackend
from umbel.lang.wire import JSON, decode_request
from umbel.runtime.server import BackgroundServer, create_app

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/README.md", "docs/server.md"]
SELECT_METHODS = LocalBackend.capabilities.select_methods
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


def test_the_first_program_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = _blocks(README, "python")
    assert '"smollm2"' in program
    engine = FakeEngine()
    capabilities = {"token_native": True, "regex": True, "select_methods": sorted(SELECT_METHODS)}
    app = create_app(engine, model_name="fake", capabilities=capabilities)
    with BackgroundServer(app) as server:
        exec(program.replace('"smollm2"', repr(server.url)), {"__name__": "readme"})
    engine.close()
    assert capsys.readouterr().out.startswith("low ")


def test_the_graph_in_the_server_document_is_one() -> None:
    (body,) = _blocks((ROOT / "docs/server.md").read_text(), "json")
    request = decode_request(json.dumps(json.loads(body)).encode(), JSON)
    assert request.options.seed == 1
    assert msgspec.to_builtins(request.graph.nodes[1].op)["name"] == "city"


def test_the_changelog_has_an_unreleased_part() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
