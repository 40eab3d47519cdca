"""Says which known name an unknown one was probably meant to be; knows no particular names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence on an unknown name: a guess, or all names there are."""
    names = sorted(known)
    if meant := guess(name, names):
        return f"did you mean {meant!r}?"
    return f"it takes {', '.join(names)}"


def guess(name: str, known: Iterable[str], near: float = 0.6) -> str:
    """Return the known name that an unknown one was probably meant to be; empty if none is near.

    `near` is the least ratio, as difflib has it, of what two names have in common.
    """
    import difflib  # only errors need it

    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=near)), "")


def check_keywords(hint: Callable[[str, Any], str] | None = None) -> Callable[[F], F]:
    """Make a function refuse unknown keywords with a TypeError that names the nearest known one.

    `hint` may say something better of a keyword and its value; an empty string is no hint.
    """

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters
        known = frozenset(parameters)
        keywords = [name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY]

        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not known.issuperset(kwargs):
                name = next(name for name in kwargs if name not in known)
                words = (hint(name, kwargs[name]) if hint else "") or nearest(name, keywords)
                raise TypeError(f"{function.__name__}() has no option {name!r}: {words}")
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorate
