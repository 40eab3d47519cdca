"""Values written as JSON come back equal, of the same type; what has no form is refused."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import math
import uuid
from enum import Enum, Flag
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, RootModel

from umbel.lang.errors import ProgramError
from umbel.lang.value_codec import check_type, decode_value, encode_value

T = TypeVar("T")


class Color(Enum):
    RED = "r"
    BLUE = 2


class Bits(Flag):
    A = 1
    B = 2


class Item(BaseModel):
    name: str = Field(alias="Name")
    count: int = 3
    color: Color = Color.RED


class Order(BaseModel):
    model_config = ConfigDict(extra="allow")
    items: list[Item]
    when: datetime.date | None = None


class Names(RootModel[list[str]]):
    pass


class Secretive(BaseModel):
    x: int
    _hidden: int = PrivateAttr(default=1)


class Box(BaseModel, Generic[T]):
    inside: T


class Picky(msgspec.Struct):
    x: int

    def __post_init__(self) -> None:
        self.x = 1 // self.x


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    tags: tuple[float, ...] = ()


@dataclasses.dataclass
class Positive:
    x: int

    def __post_init__(self) -> None:
        assert self.x > 0, "made anew"


class Struct(msgspec.Struct):
    point: Point
    names: dict[int, str]


class Pair(NamedTuple):
    left: Any
    right: Any


class Typed(TypedDict):
    order: Order


def there_and_back(value: Any) -> Any:
    types: dict[str, str] = {}
    encoded = encode_value(value, "/value", types)
    data, types = msgspec.json.decode(msgspec.json.encode((encoded, types)))
    return decode_value(data, "/value", types)


changed = Positive(1)
changed.x = -1
ITEM = Item(Name="x", color=Color.BLUE)


@pytest.mark.parametrize(
    "value",
    [
        2**80,
        -(2**63),
        1e300,
        math.inf,
        b"\0\xff",
        1 + 2j,
        {1: "x", (2, 3): None},
        {"a/b": (1,), "~": {"~1": {2}}},
        frozenset([1]),
        datetime.datetime(2020, 1, 2, 3, 4, 5, 6, datetime.UTC),
        datetime.date(2020, 1, 2),
        datetime.time(3, 4),
        datetime.timedelta(-1, 2, 3),
        decimal.Decimal("1.10"),
        uuid.UUID(int=5),
        Color.BLUE,
        ITEM,
        Order.model_validate({"items": [ITEM, {"Name": "b", "count": 4}], "more": [1]}),
        Names(["a"]),
        Point(1, (2.0,)),
        changed,
        Struct(Point(1), {1: "a"}),
        Pair(Pair(1, [Color.RED]), {"x": ITEM}),
    ],
    ids=repr,
)
def test_a_value_comes_back_equal_and_of_its_type(value: Any) -> None:
    back = there_and_back(value)
    assert back == value
    assert type(back) is type(value)
    assert repr(back) == repr(value)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(values)
def test_any_plain_value_comes_back(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_plain_json_is_written_as_it_is() -> None:
    types: dict[str, str] = {}
    value = {"a": [1, 2.5, "x", None, True]}
    assert encode_value(value, "/value", types) == value
    assert types == {}
    assert encode_value(ITEM, "/value", types) == {"name": "x", "count": 3, "color": "BLUE"}
    assert types["/value"] == f"{__name__}:Item"


def test_what_pydantic_was_given_is_told_from_defaults() -> None:
    assert there_and_back(ITEM).model_fields_set == {"name", "color"}
    assert there_and_back(ITEM).model_dump_json() == ITEM.model_dump_json()


def local() -> type:
    class Local(BaseModel):
        x: int

    return Local


class Plain:
    pass


def boxed() -> Box[str]:
    return Box[str](inside="x")


def cyclic() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1, {"a": Plain()}], "^/value/1/a: .*Plain has no form in a file"),
        (local()(x=1), "Local can't be found by its name .*define it at the top of a module"),
        (boxed(), "can't be found by its name"),
        (Secretive(x=1), "has private attributes"),
        (Bits.A | Bits.B, "is no single member of Bits"),
        (lambda: 1, "has no form in a file"),
        (cyclic(), "holds itself"),
    ],
)
def test_what_has_no_form_is_refused(value: Any, says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        encode_value(value, "/value", {})


@pytest.mark.parametrize(
    "tp",
    [
        int,
        list[Order],
        dict[str, Color] | None,
        Literal["a", Color.RED],
        Annotated[int, Field(ge=0)],
        Typed,
        Struct,
        Pair,
        tuple[Point, ...],
        Any,
        T,
        {"type": "object"},
        None,
    ],
    ids=repr,
)
def test_types_of_values_that_have_a_form_pass(tp: Any) -> None:
    check_type(tp)


@dataclasses.dataclass
class Deep:
    inner: dict[str, list[Plain]]


@pytest.mark.parametrize("tp", [Plain, list[local()], Deep, int | Plain, Literal[1] | local()])  # type: ignore[misc]
def test_types_of_values_that_have_none_are_refused(tp: Any) -> None:
    with pytest.raises(ProgramError, match=r"no form in a file|can't be found by its name"):
        check_type(tp)


def named(name: str) -> dict[str, str]:
    return {"/value": f"{__name__}:{name}"}


@pytest.mark.parametrize(
    ("data", "name", "says"),
    [
        ({"x": 1}, "Gone", "no such class is loaded: import its module"),
        ({"x": 1}, "Plain", "no such class is loaded"),
        ({"x": 1}, "there_and_back", "no such class is loaded"),
        ({"y": 1, "tags": []}, "Point", "which has changed since .* its fields are tags, x"),
        ({"name": "x"}, "Item", "which has changed .* its fields are color, count, name"),
        ("GREEN", "Color", "which has changed since it was written: KeyError: 'GREEN'"),
        ({"point": 1}, "Struct", "which has changed"),
        ({"x": 0}, "Picky", "which has changed since it was written: ZeroDivisionError: "),
    ],
)
def test_a_class_that_changed_is_told(data: Any, name: str, says: str) -> None:
    with pytest.raises(ProgramError, match=says):
        decode_value(data, "/value", named(name))


def test_reading_imports_nothing() -> None:
    with pytest.raises(ProgramError, match="no such class is loaded"):
        decode_value({}, "/value", {"/value": "this.is.no.module:Thing"})
    with pytest.raises(ProgramError, match="no such class is loaded"):
        decode_value({"args": "true"}, "/value", {"/value": "subprocess:Popen"})
