"""What is told of a compile that met a limit, of time or memory, or the compiler's end."""

from __future__ import annotations

from umbel.lang.errors import ConstraintError, EngineStoppedError


class TooLateError(ConstraintError):
    """Compiling took longer than it was given; with more time it may succeed."""

    @classmethod
    def of(cls, seconds: float, what: str = "compiling the constraint") -> TooLateError:
        """Return the error of what was given so many seconds."""
        return cls(str(took_more_than(f"{seconds:g} s", what)))

    def told(self) -> ConstraintError:
        """Return it as an error that may leave this room: one of those that are known outside."""
        return ConstraintError(str(self))


def took_more_than(limit: str, what: str = "compiling the constraint") -> ConstraintError:
    """Return the error of work that met a limit, of time or of memory."""
    return ConstraintError(
        f"{what} took more than {limit}: simplify the constraint (repetitions of repetitions "
        "multiply), or name another engine"
    )


def closed_error() -> EngineStoppedError:
    """Return the error of work that a compiler is given, or still has, when it is closed."""
    return EngineStoppedError("the grammar compiler is closed")
