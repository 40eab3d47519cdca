"""Types as constraints, walked at random: whatever can be generated is a value of the type."""

from __future__ import annotations

import dataclasses
import datetime
import random
import uuid
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import pytest
from pydantic import BaseModel, Field

from umbel.lang.typed_values import value_type
from umbel.runtime.grammar import GrammarCompiler

from .walks import mask


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    good: bool


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


@dataclasses.dataclass
class Times:
    at: datetime.datetime
    day: datetime.date
    hour: datetime.time
    lasts: datetime.timedelta


class Order(BaseModel):
    id: uuid.UUID
    price: Decimal
    size: Size
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    due: datetime.datetime | None


class Pair(NamedTuple):
    left: int
    right: Size


class Row(TypedDict):
    id: uuid.UUID
    names: list[str]


TYPES: list[Any] = [
    datetime.datetime, datetime.date, datetime.time, datetime.timedelta, Decimal, uuid.UUID,
    int | str, int | None, str | None, bool | int, datetime.datetime | None, uuid.UUID | int,
    int | list[str], Cat | Dog, Annotated[Cat | Dog, Field(discriminator="kind")],
    Literal[1, "a", None], list[Literal["a", "b"]], list[datetime.date], dict[str, int],
    tuple[int, str], set[int], frozenset[int], list[Cat | Dog], list[Decimal],
    Annotated[int, Field(ge=3, le=40)], Annotated[Decimal, Field(ge=0, decimal_places=2)],
    Annotated[Decimal, Field(max_digits=5, decimal_places=2)], Annotated[Decimal, Field(gt=1)],
    Annotated[str, Field(pattern=r"^[A-Z]{2}$")], Times, Order, Pair, Row, list[Size],
]  # fmt: skip


@pytest.mark.parametrize("tp", TYPES, ids=str)
def test_what_is_generated_is_a_value_of_the_type(tp: Any, json_compiler: GrammarCompiler) -> None:
    rng = random.Random(3)
    value = value_type(tp)
    grammar = json_compiler.compile(value.constraint)
    tokens, eos_ids = json_compiler.vocabulary.token_bytes, json_compiler.vocabulary.eos_ids
    num_found = 0
    for _ in range(40):
        matcher, data = grammar.matcher(), b""
        for _ in range(500):
            allowed = sorted(mask(matcher, json_compiler.vocabulary).difference(eos_ids))
            if not allowed or (matcher.is_accepting and rng.random() < 0.5):
                break
            closing = [t for t in allowed if tokens[t] in b'"}],0']
            token_id = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
            assert matcher.accept(token_id)
            data += tokens[token_id]
        if matcher.is_accepting:
            value.decode(data.decode())  # raises where it does not fit
            num_found += 1
    assert num_found >= 10
