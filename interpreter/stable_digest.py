"""Digests of programs and of their arguments that are the same in every process.

A program's digest covers the code of its body and what that names in its module: functions and
programs, constants, and the fields of classes. Comments, places in the file and backends have no
part in it.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import hashlib
import inspect
import numbers
import os
import sys
import types
import uuid
from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec

from umbel.lang.errors import ConstraintError, ProgramError
from umbel.lang.expressions import GenExpr, SelectExpr
from umbel.lang.program import Program
from umbel.lang.runner import Call
from umbel.lang.typed_values import value_type
from umbel.lang.value_codec import fields_of, is_data_class

_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_BY_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, complex)
_CONSTANTS = (str, bytes, int, float, bool, type(None), enum.Enum)


def program_digest(call: Call) -> str:
    """Return a digest of a call's program: of its body, the object it belongs to, its sampling.

    It holds for one minor version of Python, whose code it reads. Raises ProgramError when the
    object has no stable form.
    """
    form = _Forms(inspect.unwrap(call.body).__module__)
    parts = [
        form.of_code(call.body),
        [form.of(value, f"the program's object, {type(value).__name__}") for value in call.prefix],
        None if call.settings.sampling is None else msgspec.to_builtins(call.settings.sampling),
        list(sys.version_info[:2]),
    ]
    return _hash(parts)


def arguments_digest(call: Call) -> str:
    """Return a digest of a call's arguments, however they were given.

    Raises ProgramError for an argument that has no stable form (a client, a lock, a generator).
    """
    arguments: Mapping[str, Any]
    try:
        signature = inspect.signature(call.body)
        arguments = signature.bind(*call.prefix, None, *call.args, **call.kwargs).arguments
        arguments = dict(list(arguments.items())[len(call.prefix) + 1 :])
    except TypeError:  # the body will say so, for this row
        arguments = {"args": call.args, "kwargs": call.kwargs}
    form = _Forms("")
    parts = [[name, form.of(value, f"argument {name!r}")] for name, value in arguments.items()]
    try:
        return _hash(sorted(parts, key=lambda part: str(part[0])))
    except UnicodeEncodeError as error:
        raise ProgramError(
            f"an argument's text is not Unicode, so its row has no place in a results file: {error}"
        ) from None


def _hash(form: object) -> str:
    return hashlib.blake2b(_encode(form), digest_size=12).hexdigest()


class _Forms:
    """Makes forms: nested lists of texts and numbers, equal for equal things in any process."""

    def __init__(self, module: str) -> None:
        self._module = module  # whose functions count as parts of the program
        self._seen: dict[int, int] = {}  # functions by identity; and a function may name itself

    def of(self, value: object, where: str) -> object:
        """Return a value's form; raises ProgramError where it has none."""
        try:
            return self._of(value, where)
        except RecursionError:
            raise ProgramError(f"{where} holds itself, so it has no stable form") from None

    def _of(self, value: Any, where: str) -> object:
        kind = type(value)
        if value is None or kind in (str, bool, bytes):
            return value
        if isinstance(value, enum.Enum):
            return ["enum", _name(kind), value.name]
        if isinstance(value, numbers.Integral):  # numpy's too
            whole = int(value)  # Python writes no decimal of more than 4,300 digits
            return ["int", str(whole) if whole.bit_length() < 8192 else hex(whole)]
        if isinstance(value, numbers.Real) and not isinstance(value, decimal.Decimal):
            return ["float", repr(float(value))]
        if isinstance(value, _BY_TEXT):
            return [_name(kind), str(value)]
        if isinstance(value, os.PathLike):
            return ["path", os.fspath(value)]
        if isinstance(value, str | bytes | bytearray):
            return [
                _name(kind),
                bytes(value) if isinstance(value, bytes | bytearray) else str(value),
            ]
        if isinstance(value, GenExpr | SelectExpr):
            return ["expression", msgspec.to_builtins(value.op(None)), value.label]
        if isinstance(value, Program):
            return ["program", self.of_code(inspect.unwrap(value))]
        if isinstance(value, types.FunctionType | types.MethodType):
            return ["function", _name(value), self.of_code(value)]
        if isinstance(value, types.BuiltinFunctionType | types.ModuleType):
            return ["name", _name(value)]
        if isinstance(value, type | types.GenericAlias):
            return _of_class(value)
        return self._of_parts(value, where)

    def _of_parts(self, value: Any, where: str) -> object:
        kind = type(value)
        if is_data_class(kind):
            return self._of_fields(value, fields_of(value), where)
        if isinstance(value, Mapping):
            items = [
                [self._of(key, f"a key of {where}"), self._of(item, f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
            return ["mapping", items]
        if kind is range:  # which may be longer than any list
            return ["range", str(value)]
        if isinstance(value, Set):
            return ["set", sorted(_hash(self._of(item, f"an item of {where}")) for item in value)]
        if isinstance(value, Sequence):
            return [
                "tuple" if isinstance(value, tuple) else "list",
                [self._of(item, f"{where}[{i}]") for i, item in enumerate(value)],
            ]
        if not _is_opaque(value):
            return self._of_fields(value, vars(value), where)
        raise ProgramError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which has no form that stays the "
            "same in the next process, so its row can't be found again in a results file: pass "
            "plain data, or leave it to a name in the program's module"
        )

    def _of_fields(self, value: object, fields: Mapping[str, Any], where: str) -> object:
        parts = [[name, self._of(item, f"{where}.{name}")] for name, item in fields.items()]
        return ["object", _name(type(value)), parts]

    def of_code(self, function: Any) -> object:
        """Return the form of a function: its code, and what it names in the program's module."""
        if isinstance(function, types.MethodType):
            function = function.__func__
        if not isinstance(function, types.FunctionType):  # an object that can be called
            call = type(function).__call__
            return [_name(type(function)), self.of_code(call) if _is_python(call) else None]
        if id(function) in self._seen:
            return ["again", self._seen[id(function)]]
        self._seen[id(function)] = len(self._seen)
        named = {name: function.__globals__.get(name) for name in _names_in(function.__code__)}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        named |= {name: _content(cell) for name, cell in cells}
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return [
            _of_code_object(function.__code__, function.__doc__),
            [self._of_named(value) for value in defaults],
            [[name, self._of_named(value)] for name, value in sorted(named.items())],
        ]

    def _of_named(self, value: Any) -> object:
        """Return the form of what a name stands for: of constants, code and classes only."""
        if isinstance(value, _CONSTANTS):
            return self._of(value, "a constant")
        if type(value) is tuple:
            return [self._of_named(item) for item in value]
        if isinstance(value, Program):
            function = inspect.unwrap(value)
            return self.of_code(function) if function.__module__ == self._module else _name(value)
        if isinstance(value, types.FunctionType):
            return self.of_code(value) if value.__module__ == self._module else _name(value)
        if isinstance(value, GenExpr | SelectExpr):
            return self._of(value, "an expression")
        return _of_class(value) if isinstance(value, type | types.GenericAlias) else None


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that Python code made


def _is_opaque(value: object) -> bool:
    """Whether an object may hold more than its attributes."""
    classes = type(value).__mro__[:-1]
    is_foreign = not all(cls.__flags__ & _HEAP_TYPE for cls in classes)
    has_slots = any(vars(cls).get("__slots__") for cls in classes)
    has_dict = bool(type(value).__dictoffset__)
    return not has_dict or is_foreign or has_slots or callable(value) or inspect.isawaitable(value)


def _is_python(function: object) -> bool:
    return isinstance(function, types.FunctionType)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _names_in(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names |= _names_in(const)
    return names


def _of_code_object(code: types.CodeType, doc: str | None) -> object:
    consts = [
        None if i == 0 and const == doc else _of_const(const)
        for i, const in enumerate(code.co_consts)
    ]
    variables = [*code.co_varnames, "", *code.co_freevars, "", *code.co_cellvars]
    return [code.co_name, code.co_code, consts, list(code.co_names), variables, code.co_flags]


def _of_const(const: object) -> object:
    if isinstance(const, types.CodeType):
        return _of_code_object(const, None)
    if isinstance(const, tuple):
        return ["tuple", *map(_of_const, const)]
    if isinstance(const, frozenset):
        return ["set", *sorted(_hash(_of_const(item)) for item in const)]
    return [type(const).__name__, const if isinstance(const, str | bytes) else repr(const)]


def _of_class(cls: Any) -> object:
    """Return a class's name, with its schema if it has one: that is what a model sees of it."""
    try:
        return [_name(cls), _encode(value_type(cls).constraint)]
    except ConstraintError:
        return [_name(cls), None]


def _name(thing: Any) -> str:
    module = getattr(thing, "__module__", None)
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or repr(thing)
    return f"{module}:{name}"
