"""Refuses on its own line what a state can't take, before any of it is recorded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .choice_scoring import beginning_choice
from .errors import ConstraintError, ProgramError
from .expressions import GenExpr, LazyValue, Part, RoleMark, SelectExpr, ValueExpr
from .runner import Run

_HERE = str(Path(__file__).parent.parent)  # all of umbel: other languages build on states


def check_parts(parts: Sequence[Part], run: Run, role: str, role_line: str) -> None:
    """Check an expression as a whole, in the turn of `role` opened at `role_line` ('' for none).

    Raises ProgramError for turns that do not nest, for what follows several samples and for values
    of another run, ConstraintError for a select whose choices have no end.
    """
    unpicked = ""
    for part in parts:
        if isinstance(part, RoleMark):
            if part.edge == "begin":
                if role:
                    raise ProgramError(
                        f"a new {part.role} turn can't open inside the {role} turn opened at "
                        f"{role_line or 'the same line'}: close that first"
                    )
                role, role_line = part.role, ""
            elif role != part.role:
                found = f"the open turn is {role}" if role else "no turn is open"
                raise ProgramError(f"{part.role} turn can't be closed here: {found}")
            else:
                role = ""
        elif unpicked:
            raise ProgramError(pick_first(unpicked))
        elif isinstance(part, LazyValue) and part.run is not run:
            raise ProgramError(f"{part!r} belongs to another run")
        elif isinstance(part, ValueExpr):
            check_place(part, role)
            if part.num_samples > 1:
                unpicked = part.name or repr(part)


def check_place(expr: ValueExpr[Any], role: str) -> None:
    """Refuse what this place in a turn, or the lack of one, does not allow.

    That is a think block outside the assistant's turns, and a select whose choices have no end to
    score: outside a role nothing follows them.
    """
    if isinstance(expr, GenExpr) and expr.thinks and role != "assistant":
        where = f"in a {role} turn" if role else "outside of turns"
        raise ProgramError(
            f"{expr!r} has thinking=True {where}: a model thinks at the beginning of an assistant "
            "turn, as in s += assistant(gen(..., thinking=True))"
        )
    if role or not isinstance(expr, SelectExpr):
        return
    select = expr.op(None)
    if select.terminator is not None or len(select.choices) == 1:
        return
    pair = beginning_choice(select.choices)
    if pair is not None:
        raise ConstraintError(
            f"{expr!r}: choice {pair[0]!r} begins {pair[1]!r}, so the end of a choice has to be "
            "scored: select inside a role, or give terminator="
        )


def pick_first(name: str) -> str:
    """Return what to say to who goes on behind several samples."""
    return f"{name!r} has several samples: choose one with s.pick(name, i) before going on"


def user_line() -> str:
    """Return the place in the program that is running: the nearest frame outside umbel."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_HERE)
        or frame.f_code.co_filename.endswith("contextlib.py")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
