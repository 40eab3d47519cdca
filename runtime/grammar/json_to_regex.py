"""JSON schemas without recursion as regular expressions; for our own automaton.

The result accepts only valid values, in the properties' declared order. What has no exact regular
form here (open objects, bounded fractions, `allOf`, ...) gives None: another engine takes it.
Whitespace may follow `{ [ , :` and come before `} ]`, up to eight characters.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from umbel.lang import regex_syntax as rx
from umbel.lang.errors import ConstraintError
from umbel.lang.regex_parser import parse, parse_search
from umbel.lang.regex_syntax import Node

from .json_schema import MAX_COUNT, CheckedSchema, unescape_pointer
from .number_ranges import integer_range

JsonValue = Any

WHITESPACE = rx.repeat(rx.chars(" \n\r\t"), 0, 8)
MAX_DEPTH = 40
MAX_PROPERTIES = 200
MAX_BOUND_DIGITS = 500  # a bound is built digit in digit

# Every keyword that can make a value invalid, by the type it speaks of.
_BY_TYPE = {
    "string": frozenset(("minLength", "maxLength", "pattern", "format")),
    "number": frozenset(
        ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    ),
    "array": frozenset(
        (
            "items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems",
            "uniqueItems", "contains", "minContains", "maxContains",
        )
    ),
    "object": frozenset(
        (
            "properties", "patternProperties", "additionalProperties", "propertyNames",
            "unevaluatedProperties", "required", "minProperties", "maxProperties", "dependencies",
            "dependentRequired", "dependentSchemas",
        )
    ),
}  # fmt: skip
_ANY_TYPE = frozenset(
    (
        "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref",
        "$dynamicRef", "$recursiveRef",
    )
)  # fmt: skip
_IDS = ("$id", "id")  # they change what a reference below them means
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

_HEX = rx.Chars(rx.normalise([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)]))
_QUOTE = rx.literal('"')
# Characters that may stand for themselves inside a JSON string.
_PLAIN = rx.complement(rx.normalise([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))
_SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 8: "b", 12: "f", 10: "n", 13: "r", 9: "t"}


def _hex_digits(*ranges: tuple[str, str]) -> Node:
    return rx.Chars(rx.normalise((ord(a), ord(b)) for a, b in ranges))


_NOT_SURROGATE = rx.alternate(
    (
        rx.concat((_hex_digits(("0", "9"), ("a", "c"), ("A", "C"), ("e", "f"), ("E", "F")),
                   rx.repeat(_HEX, 3, 3))),
        rx.concat((rx.chars("dD"), rx.chars("01234567"), rx.repeat(_HEX, 2, 2))),
    )
)  # fmt: skip
_SURROGATE_PAIR = rx.concat(
    (
        rx.chars("dD"), rx.chars("89abAB"), rx.repeat(_HEX, 2, 2),
        rx.literal("\\u"), rx.chars("dD"), rx.chars("cdefCDEF"), rx.repeat(_HEX, 2, 2),
    )
)  # fmt: skip
# One code point of a string, however it is written.
STRING_CHARACTER = rx.alternate(
    (
        rx.Chars(_PLAIN),
        rx.concat((rx.literal("\\"), rx.chars('"\\/bfnrt'))),
        rx.concat((rx.literal("\\u"), rx.alternate((_NOT_SURROGATE, _SURROGATE_PAIR)))),
    )
)
_UNSIGNED = rx.alternate((rx.literal("0"), parse("[1-9][0-9]*")))
_INTEGER = rx.concat((rx.optional(rx.literal("-")), _UNSIGNED))
_NUMBER = rx.concat((_INTEGER, parse(r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")))

_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    rf"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
}


class _NotRegularError(Exception):
    """The schema has no regular form that we build."""


def json_to_regex(checked: CheckedSchema) -> Node | None:
    """Return the texts of valid values as a regex; None if another engine has to take it.

    The regex is NEVER where no value is valid.
    """
    try:
        return _Lowering(checked.source, checked.has_prefix_items).value(checked.source)
    except _NotRegularError:
        return None


@dataclass(slots=True)
class _Lowering:
    root: Any
    has_prefix_items: bool
    depth: int = 0

    def value(self, schema: JsonValue) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:  # a recursive reference, too
            raise _NotRegularError
        node = self._value(schema)
        self.depth -= 1
        return node

    def _value(self, schema: JsonValue) -> Node:
        if schema is False:
            return rx.NEVER
        if schema is True:
            raise _NotRegularError
        asserting = {k for k in schema if self._asserts(k)}
        if "$ref" in schema:
            self._only(asserting, "$ref")
            return self.value(self._resolve(schema["$ref"]))
        if "allOf" in schema:
            self._only(asserting, "allOf")
            if len(schema["allOf"]) != 1:
                raise _NotRegularError
            return self.value(schema["allOf"][0])
        if "anyOf" in schema:
            self._only(asserting, "anyOf")
            return rx.alternate(self.value(s) for s in schema["anyOf"])
        if "oneOf" in schema:
            self._only(asserting, "oneOf")
            self._check_disjoint(schema["oneOf"])
            return rx.alternate(self.value(s) for s in schema["oneOf"])
        if "const" in schema or "enum" in schema:
            self._only(asserting, "const", "enum", "type")
            return self._listed(schema)
        return self._typed(schema, asserting)

    @staticmethod
    def _asserts(keyword: str) -> bool:
        return keyword in _ANY_TYPE or any(keyword in names for names in _BY_TYPE.values())

    @staticmethod
    def _only(asserting: set[str], *allowed: str) -> None:
        if not asserting <= set(allowed):
            raise _NotRegularError

    def _resolve(self, ref: str) -> JsonValue:
        if ref != "#" and not ref.startswith("#/"):
            raise _NotRegularError
        target = self.root
        for part in ref.split("/")[1:]:
            key = unescape_pointer(part)
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            else:  # an anchor, an embedded $id, a percent-encoded pointer
                raise _NotRegularError
            if isinstance(target, dict) and any(isinstance(target.get(k), str) for k in _IDS):
                raise _NotRegularError
        return target

    def _listed(self, schema: dict[str, JsonValue]) -> Node:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if "const" in schema:
            values = [v for v in values if _is_same(v, schema["const"])]
        types = _types(schema)
        return rx.alternate(_exactly(v) for v in values if types is None or _type_of(v) & types)

    def _typed(self, schema: dict[str, JsonValue], asserting: set[str]) -> Node:
        types = _types(schema)
        if types is None or asserting & (_ANY_TYPE - {"type"}):
            raise _NotRegularError
        if "number" in types:
            types = types - {"integer"}
        options = []
        for name in (t for t in _TYPES if t in types):
            mine = asserting & _BY_TYPE.get("number" if name == "integer" else name, frozenset())
            options.append(self._of_type(name, schema, mine))
        return rx.alternate(options)

    def _of_type(self, name: str, schema: dict[str, JsonValue], asserting: set[str]) -> Node:
        match name:
            case "null":
                return rx.literal("null")
            case "boolean":
                return rx.alternate((rx.literal("true"), rx.literal("false")))
            case "integer":
                return self._integer(schema, asserting)
            case "number":
                self._only(asserting)
                return _NUMBER
            case "string":
                return self._string(schema, asserting)
            case "array":
                return self._array(schema, asserting)
            case _:
                return self._object(schema, asserting)

    def _integer(self, schema: dict[str, JsonValue], asserting: set[str]) -> Node:
        if "multipleOf" in asserting:
            raise _NotRegularError
        low: int | None = None
        high: int | None = None
        for keyword in asserting:
            bound = schema[keyword]
            if not isinstance(bound, int):  # a fraction, or draft 4's booleans
                raise _NotRegularError
            if keyword.endswith("inimum"):
                bound += keyword.startswith("exclusive")
                low = bound if low is None else max(low, bound)
            else:
                bound -= keyword.startswith("exclusive")
                high = bound if high is None else min(high, bound)
        if any(isinstance(schema[k], bool) for k in asserting):
            raise _NotRegularError
        if any(bound is not None and abs(bound) >= 10**MAX_BOUND_DIGITS for bound in (low, high)):
            raise _NotRegularError
        return integer_range(low, high)

    def _string(self, schema: dict[str, JsonValue], asserting: set[str]) -> Node:
        low, high = _count(schema, "minLength", 0), _count(schema, "maxLength", None)
        if high is not None and high < (low or 0):
            return rx.NEVER
        lengths: Node = rx.repeat(STRING_CHARACTER, low or 0, high)
        bodies: list[Node] = [lengths] if asserting & {"minLength", "maxLength"} else []
        if "pattern" in asserting:
            try:
                bodies.append(_in_string(parse_search(schema["pattern"])))
            except ConstraintError as error:
                raise _NotRegularError from error
        if "format" in asserting:
            if schema["format"] not in _FORMATS:
                raise _NotRegularError
            bodies.append(parse(_FORMATS[schema["format"]]))
        body = bodies[0] if bodies else lengths
        for other in bodies[1:]:
            body = rx.Both(body, other)
        return rx.concat((_QUOTE, body, _QUOTE))

    def _array(self, schema: dict[str, JsonValue], asserting: set[str]) -> Node:
        self._only(asserting, "items", "prefixItems", "additionalItems", "minItems", "maxItems")
        if "prefixItems" in asserting and not self.has_prefix_items:
            raise _NotRegularError
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        if isinstance(rest, list):
            if "prefixItems" in schema:
                raise _NotRegularError
            prefix, rest = rest, schema.get("additionalItems", True)
        low, high = _count(schema, "minItems", 0) or 0, _count(schema, "maxItems", None)
        fixed = [self.value(s) for s in prefix]
        if high is not None and high <= len(fixed):
            fixed = fixed[:high]
            rest = False
        item = self.value(rest)
        comma = rx.concat((rx.literal(","), WHITESPACE))
        # from the back: what may follow item number i
        num_more = None if high is None else high - len(fixed)
        need = max(0, low - len(fixed))
        if num_more is not None and need > num_more:
            return rx.NEVER
        more = rx.concat((comma, item))
        tail: Node = rx.repeat(more, need, num_more)
        if not fixed:
            first_only = rx.concat((item, rx.repeat(more, max(0, need - 1), _less(num_more))))
            inside = first_only if need else rx.optional(first_only)
            return _enclose("[", inside, "]")
        for i in range(len(fixed) - 1, -1, -1):
            tail = rx.concat((comma if i else rx.EMPTY, fixed[i], tail))
            if low <= i:
                tail = rx.optional(tail)
        return _enclose("[", tail, "]")

    def _object(self, schema: dict[str, JsonValue], asserting: set[str]) -> Node:
        self._only(asserting, "properties", "required", "additionalProperties")
        if schema.get("additionalProperties", True) is not False:
            raise _NotRegularError
        properties = schema.get("properties", {})
        required = set(schema.get("required", ()))
        if not required <= set(properties):
            return rx.NEVER
        if len(properties) > MAX_PROPERTIES:
            raise _NotRegularError
        members: list[tuple[Node, bool]] = []
        for key, child in properties.items():
            name = rx.concat((_exactly(key), rx.literal(":"), WHITESPACE))
            node = rx.concat((name, self.value(child)))
            if node != rx.NEVER or key in required:
                members.append((node, key in required))
        comma = rx.concat((rx.literal(","), WHITESPACE))
        # from the back: `after` is what may follow when something came before, `first` when not
        after: Node = rx.EMPTY
        first: list[Node] = [rx.EMPTY]
        for node, is_required in reversed(members):
            start = rx.concat((node, after))
            first = [start] if is_required else [*first, start]
            step = rx.concat((comma, node))
            after = rx.concat((step if is_required else rx.optional(step), after))
        return _enclose("{", rx.alternate(first), "}")

    def _check_disjoint(self, options: list[JsonValue]) -> None:
        """Refuse a `oneOf` in which a value could fit two options."""
        parts = [self._follow(option) for option in options]
        for i, left in enumerate(parts):
            for right in parts[i + 1 :]:
                if not _are_disjoint(left, right):
                    raise _NotRegularError

    def _follow(self, schema: JsonValue) -> dict[str, JsonValue]:
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict):
                raise _NotRegularError
            if "$ref" not in schema:
                return schema
            schema = self._resolve(schema["$ref"])
        raise _NotRegularError


def _types(schema: dict[str, JsonValue]) -> frozenset[str] | None:
    found = schema.get("type")
    if found is None:
        return None
    return frozenset((found,) if isinstance(found, str) else found)


def _type_of(value: JsonValue) -> frozenset[str]:
    """Return the types a value has: an integer is a number too."""
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("integer", "number") if value.is_integer() else ("number",))
        case str():
            return frozenset(("string",))
        case list():
            return frozenset(("array",))
        case _:
            return frozenset(("object",))


def _is_same(left: JsonValue, right: JsonValue) -> bool:
    """Whether two JSON values are equal: 1 is 1.0, but not true."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_same(left[k], right[k]) for k in left)
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)


def _are_disjoint(left: dict[str, JsonValue], right: dict[str, JsonValue]) -> bool:
    listed = _listed_values(left), _listed_values(right)
    if listed[0] is not None and listed[1] is not None:
        return not any(_is_same(a, b) for a in listed[0] for b in listed[1])
    types = _possible_types(left), _possible_types(right)
    if types[0] is None or types[1] is None:
        return False
    if not types[0] & types[1]:
        return True
    if types[0] != {"object"} or types[1] != {"object"}:
        return False
    common = set(left.get("required", ())) & set(right.get("required", ()))
    for key in common:
        a, b = left.get("properties", {}).get(key), right.get("properties", {}).get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            values = _listed_values(a), _listed_values(b)
            if values[0] is not None and values[1] is not None and _are_disjoint(a, b):
                return True
    return False


def _listed_values(schema: dict[str, JsonValue]) -> list[JsonValue] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _possible_types(schema: dict[str, JsonValue]) -> frozenset[str] | None:
    types = _types(schema)
    values = _listed_values(schema)
    if types is None and values is not None:
        types = frozenset().union(*(_type_of(v) for v in values))
    if types is not None and "number" in types:
        types |= {"integer"}
    return types


def _count(schema: dict[str, JsonValue], keyword: str, default: int | None) -> int | None:
    found = schema.get(keyword, default)
    if isinstance(found, float):
        found = int(found)  # the meta-schema lets 2.0 through as an integer
    if found is not None and found > MAX_COUNT:
        raise _NotRegularError
    return found


def _less(count: int | None) -> int | None:
    return None if count is None else count - 1


def _enclose(opening: str, inside: Node, closing: str) -> Node:
    """Put brackets around: with nothing inside one run of whitespace is left."""
    if inside == rx.NEVER:
        return rx.NEVER
    start = rx.concat((rx.literal(opening), WHITESPACE))
    end = rx.concat((WHITESPACE, rx.literal(closing)))
    empty = rx.concat((start, rx.literal(closing)))
    if inside == rx.EMPTY:
        return empty
    if not _is_nullable(inside):
        return rx.concat((start, inside, end))
    return rx.concat((rx.literal(opening), WHITESPACE, inside, end))


def _is_nullable(node: Node) -> bool:
    match node:
        case rx.Concat(parts):
            return all(map(_is_nullable, parts))
        case rx.Alternate(options):
            return any(map(_is_nullable, options))
        case rx.Repeat(body, low):
            return low == 0 or _is_nullable(body)
        case _:
            return False


def _exactly(value: JsonValue) -> Node:
    """Return the text of one value, with free whitespace inside."""
    match value:
        case str():
            body = rx.concat(_in_string(rx.character(ord(c))) for c in value)
            return rx.concat((_QUOTE, body, _QUOTE))
        case list():
            return _enclose("[", _joined([_exactly(v) for v in value]), "]")
        case dict():
            members = [
                rx.concat((_exactly(k), rx.literal(":"), WHITESPACE, _exactly(v)))
                for k, v in value.items()
            ]
            return _enclose("{", _joined(members), "}")
        case float() if value.is_integer():  # 2.0 is also written as 2
            return rx.alternate((rx.literal(json.dumps(value)), rx.literal(str(int(value)))))
        case _:
            return rx.literal(json.dumps(value))


def _joined(items: list[Node]) -> Node:
    comma = rx.concat((rx.literal(","), WHITESPACE))
    parts = [items[0]] if items else []
    for _, item in pairwise(items):
        parts += [comma, item]
    return rx.concat(parts)


@lru_cache(maxsize=4096)  # thousands of enum values hold few different characters
def _set_in_string(ranges: rx.Ranges) -> Node:
    options: list[Node] = [rx.Chars(rx.intersect(ranges, _PLAIN))]
    for code in (*range(0x20), 0x22, 0x5C):
        if any(low <= code <= high for low, high in ranges):
            short = _SHORT_ESCAPES.get(code)
            options.append(rx.literal(f"\\{short}" if short else f"\\u{code:04x}"))
    return rx.alternate(options)


def _in_string(node: Node) -> Node:
    """Return how the texts of `node` are written inside a JSON string.

    Characters that can stand for themselves do; the others take their escape.
    """
    match node:
        case rx.Chars(ranges):
            return _set_in_string(ranges)
        case rx.Concat(parts):
            return rx.concat(_in_string(p) for p in parts)
        case rx.Alternate(alternatives):
            return rx.alternate(_in_string(o) for o in alternatives)
        case rx.Repeat(body, low, high):
            return rx.repeat(_in_string(body), low, high)
        case rx.Both(left, right):
            return rx.Both(_in_string(left), _in_string(right))
        case rx.Without(left, right):
            return rx.Without(_in_string(left), _in_string(right))
        case rx.Anchor():
            raise AssertionError("anchors are resolved by the parser")
