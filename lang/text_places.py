"""Lines and columns of texts, as errors name them."""

from __future__ import annotations


def line_and_column(text: str, position: int) -> str:
    """Return the place of an index in a text, in words; both are counted from 1."""
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return f"line {line}, column {column}"
