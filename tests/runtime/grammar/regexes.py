"""Random regexes over {a, b, c} in Python's syntax, all operators."""

from __future__ import annotations

import random

_ATOMS = ("a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"[^\Wb]", "(?:)", "a|b", r"\x61", "[b-c]")
_SIGNS = ("*", "+", "?", "{2}", "{1,2}", "{0,2}", "{2,}", "{,1}", "*?", "+?", "??", "{1,2}?")


def random_regex(rng: random.Random, depth: int) -> str:
    """Return a regex whose operators nest at most `depth` deep."""
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return rng.choice(_ATOMS)
    if kind < 0.5:
        return random_regex(rng, depth - 1) + random_regex(rng, depth - 1)
    if kind < 0.75:
        return f"(?:{random_regex(rng, depth - 1)}|{random_regex(rng, depth - 1)})"
    return f"({random_regex(rng, depth - 1)}){rng.choice(_SIGNS)}"


def anchored(rng: random.Random, pattern: str) -> str:
    """Return the pattern, sometimes with anchors that a whole match makes idle."""
    return rng.choice((pattern, pattern, f"^(?:{pattern})$", f"(^{pattern}$)", rf"\A(?:{pattern})\Z"))
