"""Random regexes over {a, b, c} in Python's syntax, all operators."""

from __future__ import annotations

import random

_ATOMS = ("a", "b", "c", ".", "[ab]", "[^a]", r"\w", r"[^\Wb]", "(?:)", "a|b", r"\x61", "[b-c]")
_SIGNS = ("*", "+", "?", "{2}", "{1,2}", "{0,2}", "{2,}", "{,1}", "*?", "+?", "??", "{1,2}?")


def random_regex(rng: random.Random, depth: int, signs: int = 2) -> str:
    """Return a regex whose operators nest at most `depth` deep, repetitions at most `signs` deep.

    `re` takes exponential time where repetitions nest; the oracle has to answer.
    """
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return rng.choice(_ATOMS)
    first = random_regex(rng, depth - 1, signs if kind < 0.75 else max(0, signs - 1))
    if kind < 0.5:
        return first + random_regex(rng, depth - 1, signs)
    if kind < 0.75 or signs == 0:
        return f"(?:{first}|{random_regex(rng, depth - 1, signs)})"
    return f"({first}){rng.choice(_SIGNS)}"


def anchored(rng: random.Random, pattern: str) -> str:
    """Return the pattern, sometimes with anchors that a whole match makes idle."""
    return rng.choice(
        (pattern, pattern, f"^(?:{pattern})$", f"(^{pattern}$)", rf"\A(?:{pattern})\Z")
    )
