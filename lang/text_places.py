"""Places in texts: where a parser stands, and lines and columns as errors name them."""

from __future__ import annotations


def line_and_column(text: str, position: int) -> str:
    """Return the place of an index in a text, in words; both are counted from 1."""
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return f"line {line}, column {column}"


class Cursor:
    """A place in a text, for parsers that go through it from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def _peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def _take(self, token: str) -> bool:
        """Step over a token; False (and no step) if the text goes on otherwise."""
        if self.text.startswith(token, self.at):
            self.at += len(token)
            return True
        return False
