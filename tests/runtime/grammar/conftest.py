"""Grammar compilers that tests share: starting the child process takes a moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from umbel.runtime.grammar import GrammarCompiler
from umbel.runtime.models.gguf_file import GGUFFile
from umbel.runtime.tokenizer import Tokenizer
from umbel.runtime.vocabulary import Vocabulary

from .vocabularies import abc_vocabulary, json_vocabulary


@pytest.fixture(scope="session")
def abc() -> Iterator[GrammarCompiler]:
    yield from _compiler(abc_vocabulary())


@pytest.fixture(scope="session")
def json_compiler() -> Iterator[GrammarCompiler]:
    yield from _compiler(json_vocabulary())


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[GrammarCompiler]:
    yield from _compiler(Tokenizer.from_gguf(GGUFFile(smollm2_path)).vocabulary())


def _compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(vocabulary)
    yield compiler
    compiler.close()
