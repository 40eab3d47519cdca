"""The public JSON-Schema-Test-Suite, each schema compiled and each instance walked by tokens.

The suite is in the source distribution of the jsonschema package (MIT), fetched with pip.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from umbel.lang.constraints import JsonSchema
from umbel.lang.errors import ConstraintError
from umbel.runtime.grammar import CompiledGrammar, GrammarCompiler, validate_after

from .vocabularies import byte_vocabulary
from .walks import accepts

pytestmark = pytest.mark.slow

URIS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jsonschema")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary",
               "jsonschema", "jsonschema==4.26.0", "--dest", str(folder)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archive = folder / "jsonschema-4.26.0.tar.gz"
    if not archive.exists():
        pytest.skip(f"the suite can't be downloaded: {done.stderr[-300:]}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / "jsonschema-4.26.0" / "json" / "tests"


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_vocabulary())
    yield compiler
    compiler.close()


def groups(suite: Path, draft: str) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Yield (schema text, [(instance text, whether it is valid)]) of the required files."""
    for path in sorted((suite / draft).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            schema: Any = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": URIS[draft], **schema}
            yield (
                json.dumps(schema),
                [(json.dumps(t["data"], ensure_ascii=False), t["valid"]) for t in group["tests"]],
            )


def try_compile(compiler: GrammarCompiler, constraint: JsonSchema) -> CompiledGrammar | None:
    try:
        return compiler.compile(constraint)
    except ConstraintError:
        return None


@pytest.mark.parametrize(
    ("draft", "least"), [("draft4", 0.7), ("draft7", 0.6), ("draft2020-12", 0.4)]
)
def test_strict_accepts_nothing_invalid(
    suite: Path, compiler: GrammarCompiler, draft: str, least: float
) -> None:
    count: Counter[str] = Counter()
    wrong: list[tuple[str, str]] = []
    for schema, tests in groups(suite, draft):
        count["groups"] += 1
        grammar = try_compile(compiler, JsonSchema(schema))
        if grammar is None:
            continue
        count["compiled"] += 1
        for text, is_valid in tests:
            accepted = accepts(grammar, compiler.vocabulary.encode(text))
            count["wrong rejects"] += is_valid and not accepted
            if accepted and not is_valid:
                wrong.append((schema, text))
    print(f"{draft}, strict: {dict(count)}, {count['compiled'] / count['groups']:.0%} compile")  # noqa: T201
    assert wrong == []
    assert count["compiled"] >= least * count["groups"]


@pytest.mark.parametrize("draft", ["draft4", "draft7", "draft2020-12"])
def test_nine_groups_in_ten_are_right_with_validation_afterwards(
    suite: Path, compiler: GrammarCompiler, draft: str
) -> None:
    num_groups = num_right = 0
    for schema, tests in groups(suite, draft):
        constraint = JsonSchema(schema, strict=False)
        grammar = try_compile(compiler, constraint)
        num_groups += 1
        num_right += all(
            is_valid == (grammar is not None and survives(compiler, grammar, constraint, text))
            for text, is_valid in tests
        )
    print(f"{draft}, validated afterwards: {num_right} of {num_groups} groups are right")  # noqa: T201
    assert num_right >= 0.9 * num_groups


def survives(
    compiler: GrammarCompiler, grammar: CompiledGrammar, constraint: JsonSchema, text: str
) -> bool:
    if not accepts(grammar, compiler.vocabulary.encode(text)):
        return False
    try:
        validate_after(constraint, text)
    except ConstraintError:
        return False
    return True
