"""Output constraints as plain data; knows nothing of automata or tokens."""

from __future__ import annotations

from typing import Literal

import msgspec


class Regex(msgspec.Struct, frozen=True, gc=False, tag="regex"):
    """The whole value matches `pattern` (as `re.fullmatch`, with ASCII classes)."""

    pattern: str


class JsonSchema(msgspec.Struct, frozen=True, gc=False, tag="json_schema", omit_defaults=True):
    """The value is JSON text valid under `schema` (JSON text of the schema).

    With `strict=False` keywords that can't be enforced while generating are checked afterwards.
    """

    schema: str
    strict: bool = True


class Grammar(msgspec.Struct, frozen=True, gc=False, tag="grammar"):
    """The value is a sentence of a context-free grammar."""

    text: str
    syntax: Literal["lark", "gbnf"] = "lark"


class Choices(msgspec.Struct, frozen=True, gc=False, tag="choices"):
    """The value is one of `choices`."""

    choices: tuple[str, ...]


Constraint = Regex | JsonSchema | Grammar | Choices
