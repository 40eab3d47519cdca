"""Values of programs as JSON, and back as equal values; reads and writes no files.

What JSON has no form for is told beside it: `types` maps a JSON pointer to the name of the type
that stands there, so that the JSON itself stays plain to whoever else reads it. A class is named by
its module and looked up among those that are loaded; nothing is imported or called to read a value
but the class's own way to be made from its fields.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import math
import sys
import typing
import uuid
from collections.abc import Callable, Mapping
from enum import Enum
from types import GenericAlias, ModuleType
from typing import Any

import msgspec

from .errors import ProgramError, described

_MAX_INT = 2**63

#: standard types with one text: how to write it, how to read it
_TEXTS: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (lambda v: base64.b64encode(v).decode(), base64.b64decode),
    complex: (str, complex),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    decimal.Decimal: (str, decimal.Decimal),
    uuid.UUID: (str, uuid.UUID),
    float: (repr, float),  # of those that JSON lacks
    int: (str, int),  # of those that readers of JSON round
}
_BY_NAME = {kind.__name__: read for kind, (_, read) in _TEXTS.items()}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}
_PLAIN = (str, int, float, bool, type(None), list, dict, tuple, datetime.timedelta)


class _CannotWrite(Exception):
    """A value has no form; says why."""


def encode_value(value: object, at: str, types: dict[str, str]) -> Any:
    """Return a value as JSON's types, and note in `types` what it was; `at` is its JSON pointer.

    Takes what JSON has, tuples, sets, dates, decimals, UUIDs, bytes, enums, dataclasses, named
    tuples, msgspec structs and pydantic models. Raises ProgramError for anything else, and for a
    class that can't be found by its name.
    """
    try:
        return _encode(value, at, types)
    except _CannotWrite as error:
        raise ProgramError(f"{error}: return plain data, or objects of such classes") from None
    except RecursionError:
        raise ProgramError(f"{at}: the value holds itself, so it has no end to write") from None


def decode_value(data: Any, at: str, types: Mapping[str, str]) -> Any:
    """Return the value that `encode_value` wrote.

    Raises ProgramError where a class is not loaded, or has changed so that the fields do not fit.
    """
    kind = types.get(at)
    if kind is None:
        if isinstance(data, list):
            return [decode_value(item, f"{at}/{i}", types) for i, item in enumerate(data)]
        if isinstance(data, dict):
            return {key: decode_value(item, pointer(at, key), types) for key, item in data.items()}
        return data
    if kind in _BY_NAME:
        return _BY_NAME[kind](data)
    if kind in ("tuple", "set", "frozenset", "dict", "timedelta"):
        items = [decode_value(item, f"{at}/{i}", types) for i, item in enumerate(data)]
        match kind:
            case "tuple":
                return tuple(items)
            case "dict":
                return dict(items)
            case "timedelta":
                return datetime.timedelta(*items)
            case _:
                return set(items) if kind == "set" else frozenset(items)
    cls = _find(kind)
    if cls is None:
        raise ProgramError(f"{at} is a {kind}, and no such class is loaded: import its module")
    try:
        return _make(cls, data, at, types)
    except ProgramError:
        raise  # of a value inside
    except (
        Exception
    ) as error:  # making an object can run its class's own code, which raises anything
        raise ProgramError(
            f"{at} can't be read as a {kind}, which has changed since it was written: "
            f"{described(error)}"
        ) from error


def check_type(tp: object) -> None:
    """Refuse with a ProgramError a type whose values `encode_value` could not write.

    A JSON schema and what can't be told beforehand (`Any`, type variables) pass.
    """
    _check_type(tp, set())


def is_data_class(cls: type) -> bool:
    """Whether objects of a class are their fields: of a dataclass, struct, model or named tuple."""
    return (
        dataclasses.is_dataclass(cls)
        or issubclass(cls, msgspec.Struct)
        or _is_named_tuple(cls)
        or _is_model(cls)
    )


def fields_of(value: object) -> dict[str, Any]:
    """Return the fields of an object of a data class."""
    if isinstance(value, msgspec.Struct):
        return {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return dict(zip(type(value)._fields, value, strict=True))  # type: ignore[attr-defined]
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(vars(value)) | (getattr(value, "__pydantic_extra__", None) or {})


def _encode(value: Any, at: str, types: dict[str, str]) -> Any:
    kind: Any = type(value)
    if value is None or kind is str or kind is bool:
        return value
    if kind is int and -_MAX_INT <= value < _MAX_INT:
        return value
    if kind is float and math.isfinite(value):
        return value
    if kind in _TEXTS:
        types[at] = kind.__name__
        return _TEXTS[kind][0](value)
    if kind is list:
        return _encode_items(value, at, types)
    if kind is dict:
        return _encode_dict(value, at, types)
    if kind is tuple or kind in _SETS:
        types[at] = "tuple" if kind is tuple else _SETS[kind]
        return _encode_items(value, at, types)
    if isinstance(value, datetime.timedelta) and kind is datetime.timedelta:
        types[at] = "timedelta"
        return [value.days, value.seconds, value.microseconds]
    if isinstance(value, Enum):
        if kind.__members__.get(value.name) is not value:
            raise _CannotWrite(f"{at}: {value!r} is no single member of {kind.__qualname__}")
        types[at] = _name(kind, at)
        return value.name
    if is_data_class(kind):
        types[at] = _name(kind, at)
        return _encode_object(value, at, types)
    raise _CannotWrite(f"{at}: {_full_name(kind)} has no form in a file: {value!r:.80}")


def _encode_items(items: Any, at: str, types: dict[str, str]) -> list[Any]:
    return [_encode(item, f"{at}/{i}", types) for i, item in enumerate(items)]


def _encode_dict(value: dict[Any, Any], at: str, types: dict[str, str]) -> Any:
    if all(type(key) is str for key in value):
        return {key: _encode(item, pointer(at, key), types) for key, item in value.items()}
    types[at] = "dict"
    pairs = list(value.items())
    return [
        [_encode(key, f"{at}/{i}/0", types), _encode(item, f"{at}/{i}/1", types)]
        for i, (key, item) in enumerate(pairs)
    ]


def _encode_object(value: object, at: str, types: dict[str, str]) -> dict[str, Any]:
    if _is_model(type(value)):
        state: dict[str, Any] = value.__getstate__()  # type: ignore[assignment]
        if state.get("__pydantic_private__"):
            raise _CannotWrite(f"{at}: {_full_name(type(value))} has private attributes")
        unset = [name for name in vars(value) if name not in state["__pydantic_fields_set__"]]
        if unset:  # pydantic's equality and dumps tell defaults from what was given
            types[f"{at}#defaults"] = ",".join(unset)
    fields = fields_of(value)
    return {name: _encode(item, pointer(at, name), types) for name, item in fields.items()}


def _make(cls: type, data: Any, at: str, types: Mapping[str, str]) -> Any:
    if issubclass(cls, Enum):
        return cls[data]
    fields = {name: decode_value(item, pointer(at, name), types) for name, item in data.items()}
    if issubclass(cls, msgspec.Struct) or _is_named_tuple(cls):
        return cls(**fields)
    made: Any = cls.__new__(cls)
    if _is_model(cls):
        known = set(cls.__pydantic_fields__)  # type: ignore[attr-defined]
        extra = {name: item for name, item in fields.items() if name not in known}
        takes_extra = cls.model_config.get("extra") == "allow"  # type: ignore[attr-defined]
        if known - fields.keys() or (extra and not takes_extra):
            raise ValueError(f"its fields are {', '.join(sorted(known))}")
        unset = types.get(f"{at}#defaults", "").split(",")
        made.__setstate__(
            {
                "__dict__": {name: item for name, item in fields.items() if name in known},
                "__pydantic_fields_set__": {name for name in fields if name not in unset},
                "__pydantic_extra__": extra if takes_extra else None,
                "__pydantic_private__": None,
            }
        )
        return made
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if known != fields.keys():
        raise ValueError(f"its fields are {', '.join(sorted(known))}")
    for name, item in fields.items():
        object.__setattr__(made, name, item)
    return made


def _name(cls: type, at: str) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _find(name) is not cls:
        raise _CannotWrite(
            f"{at}: {_full_name(cls)} can't be found by its name to be read back (define it at the "
            "top of a module)"
        )
    return name


def _find(name: str) -> type | None:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, type | ModuleType) else None
    return found if isinstance(found, type) and _is_known(found) else None


def _is_known(cls: type) -> bool:
    return issubclass(cls, Enum) or is_data_class(cls)


def _is_named_tuple(cls: type) -> bool:
    return issubclass(cls, tuple) and "_fields" in vars(cls)


def _is_model(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def pointer(at: str, key: str) -> str:
    """Return the JSON pointer of a key below `at`."""
    return f"{at}/" + key.replace("~", "~0").replace("/", "~1")


def _check_type(tp: Any, seen: set[int]) -> None:
    if id(tp) in seen:
        return
    seen.add(id(tp))
    if typing.get_origin(tp) is typing.Literal:
        for option in typing.get_args(tp):
            _check_type(type(option), seen)
        return
    if typing.get_origin(tp) is typing.Annotated:
        _check_type(typing.get_args(tp)[0], seen)
        return
    for part in (typing.get_origin(tp), *typing.get_args(tp)):
        _check_type(part, seen)
    if not isinstance(tp, type) or isinstance(tp, GenericAlias):
        return
    if tp in _PLAIN or tp in _TEXTS or tp in _SETS or tp is object:
        return
    if typing.is_typeddict(tp):
        pass
    elif _is_known(tp):
        try:
            _name(tp, "values")
        except _CannotWrite as error:
            raise ProgramError(str(error)) from None
    elif tp.__module__ not in ("collections.abc", "typing", "types"):
        raise ProgramError(f"values of {_full_name(tp)} have no form in a file")
    if not issubclass(tp, Enum):
        try:
            hints = typing.get_type_hints(tp)
        except NameError:  # a name that only a type checker sees: it shows when a value is written
            return
        for hint in hints.values():
            if typing.get_origin(hint) is not typing.ClassVar:
                _check_type(hint, seen)
