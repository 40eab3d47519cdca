"""What llguidance's errors say to one who knows umbel only: no options of its own, a place.

Reads messages; compiles nothing.
"""

from __future__ import annotations

import re

from umbel.lang.errors import ConstraintError

_TOO_BIG = "the constraint is too large for llguidance: simplify it"
_IN_OUR_WORDS = (
    (
        r"oneOf constraints are not supported\..*",
        "`oneOf` can't be followed while generating where its options may overlap: use `anyOf`, or "
        "options that exclude each other",
    ),
    (
        r"Schema intersection stack level exceeded",
        "`allOf`, or keywords beside a `$ref`, can't be merged with a schema that holds itself",
    ),
    (
        r"patternProperty regexes (/.*/) and (/.*/) are not disjoint",
        r"`patternProperties` \1 and \2 can match the same name",
    ),
    (
        r"can't determine if patternProperty regexes (/.*/) and (/.*/) are disjoint",
        r"`patternProperties` \1 and \2 may match the same name",
    ),
    (
        r"min/maxProperties only supported .*",
        "`minProperties` and `maxProperties` can't be followed while generating where a key of "
        "`properties` is not required",
    ),
    (r"(?:initial lexer configuration|grammar size) \(.*\) too big \(limit.*", _TOO_BIG),
    (r"; consider making your grammar left-recursive.*", ""),
)


class UnsatisfiableError(ConstraintError):
    """Nothing can satisfy the constraint."""


def grammar_error(message: str) -> ConstraintError:
    """Turn llguidance's compile error into ours: first line, and line:column as `where`."""
    found = re.match(r"(?:at )?(\d+)\((\d+)\): ", message)
    if found is None:
        is_unsatisfiable = message.startswith("Unsatisfiable")
        return (UnsatisfiableError if is_unsatisfiable else ConstraintError)(first_line(message))
    detail = message[found.end() :]
    reason = re.search(r"^error: (.*)$", detail, re.MULTILINE)
    text = first_line(detail) + (f": {reason.group(1)}" if reason else "")
    return ConstraintError(text, where=f"line {found.group(1)}, column {found.group(2)}")


def first_line(text: str) -> str:
    """Return the first line of llguidance's message, in umbel's words where it has some."""
    line = text.strip().split("\n", 1)[0]
    for theirs, ours in _IN_OUR_WORDS:
        line = re.sub(theirs, ours, line)
    return line[:400] or "no reason given"
