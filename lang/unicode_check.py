"""Refuses lone surrogates, which Python's strings may hold and no text in UTF-8 has.

What a model writes is UTF-8, so an option with one could never be chosen.
"""

from __future__ import annotations

import re
from typing import Any

from .errors import ConstraintError

_SURROGATE = re.compile("[\ud800-\udfff]")


def lone_surrogate(text: str) -> int | None:
    """Return the position of the first lone surrogate; None where there is none."""
    found = None if text.isascii() else _SURROGATE.search(text)
    return None if found is None else found.start()


def check_text(text: str, what: str) -> None:
    """Raise ConstraintError for a lone surrogate; `what` names the text."""
    position = lone_surrogate(text)
    if position is not None:
        raise ConstraintError(
            f"{what} has the lone surrogate {text[position]!a} at position {position}: it is no "
            "character, and no text has it",
            where=f"position {position}",
        )


def check_json(value: Any, what: str) -> None:
    """Raise ConstraintError for a lone surrogate in a string or key of a JSON value.

    `where` is the JSON pointer; that of a key is its object's.
    """
    todo: list[tuple[Any, str]] = [(value, "")]
    while todo:
        item, at = todo.pop()
        if isinstance(item, str):
            texts = [item]
        elif isinstance(item, dict):
            texts = [key for key in item if isinstance(key, str)]
            todo += [
                (inner, f"{at}/" + str(key).replace("~", "~0").replace("/", "~1"))
                for key, inner in item.items()
            ]
        else:
            texts = []
            if isinstance(item, list | tuple):
                todo += [(inner, f"{at}/{i}") for i, inner in enumerate(item)]
        for text in texts:
            if lone_surrogate(text) is not None:
                raise ConstraintError(
                    f"{what} has a lone surrogate, which is no character, in {text!a} at "
                    f"{at or 'its root'}",
                    where=at,
                )
