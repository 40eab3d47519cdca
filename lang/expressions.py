"""What can be appended to a state, as values that concatenate with +; appends nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

import msgspec

from .errors import ProgramError
from .ir import Gen, Select

if TYPE_CHECKING:
    from .runner import Run
    from .sampling_params import SamplingParams

T_co = TypeVar("T_co", covariant=True)


class Expr:
    """Something that `s += ...` takes, besides a string. Concatenates with strings and its like.

    An expression is not its value: it has no text to format, and formatting it is an error (the
    value is read from a state, or referred to with `s.var`).
    """

    __slots__ = ()

    def __add__(self, other: str | Expr) -> Expr:
        if not isinstance(other, str | Expr):
            return NotImplemented
        return Concat((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: str) -> Expr:
        if not isinstance(other, str):
            return NotImplemented
        return Concat((other, *parts_of(self)))

    def __str__(self) -> str:
        self._refuse_text()

    def __format__(self, spec: str) -> str:
        self._refuse_text()

    def _refuse_text(self) -> NoReturn:
        raise ProgramError(
            f"{self!r} has no text yet, so it can't go into an f-string or str(): "
            "append it with +, as in s += 'Answer: ' + gen('a')"
        )


Part = str | Expr


class Concat(Expr):
    """Expressions one after the other."""

    __slots__ = ("parts",)

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return " + ".join(map(repr, self.parts))


# without cycles and compared by identity: left out of garbage collection, since results keep many
class ValueExpr(Expr, Generic[T_co], msgspec.Struct, eq=False, gc=False, kw_only=True):
    """Makes a value: a `gen` or a `select`. It is also the value's typed handle.

    `s[handle]` reads the value that this expression made when it was last appended to `s` (or to
    a state that `s` was forked from).
    """

    append: bool = False  # the name's value is the list of all that was written under it
    decode: Callable[[str], Any] | None = None  # None: the text itself
    label: str = ""  # the type, in words
    schema: object = None  # the type itself, where one was given

    @property
    def name(self) -> str:
        """The name that the value can be read by; '' for none."""
        raise AssertionError("a ValueExpr is a GenExpr or a SelectExpr")

    @property
    def num_samples(self) -> int:
        """How many samples the value holds; a list if more than one."""
        return 1

    def op(self, defaults: SamplingParams | None) -> Gen | Select:
        """Return the operation, with the state's sampling defaults where nothing was said."""
        raise AssertionError("a ValueExpr is a GenExpr or a SelectExpr")

    def __repr__(self) -> str:
        kind = "select" if isinstance(self, SelectExpr) else "gen"
        return f"{kind}({self.name!r})" if self.name else f"{kind}()"


class GenExpr(ValueExpr[T_co], eq=False, gc=False):
    """A `gen`."""

    _gen: Gen
    _overrides: dict[str, Any]
    retries: int = 0  # further attempts where the value does not fit its type
    reask: bool = False  # each with what was wrong before it

    @property
    def name(self) -> str:
        """The name that the value can be read by; '' for none."""
        return self._gen.name

    @property
    def num_samples(self) -> int:
        """How many samples the value holds; a list if more than one."""
        return self._gen.n

    @property
    def thinks(self) -> bool:
        """Whether a think block comes before the value."""
        return self._gen.thinking

    def op(self, defaults: SamplingParams | None) -> Gen:
        """Return the operation; raises ValueError if the defaults contradict what was asked."""
        gen = self._gen
        if defaults is not None:
            sampling = msgspec.structs.replace(defaults, **self._overrides)
            gen = msgspec.structs.replace(gen, sampling=sampling)
        if self.retries and not self.reask and gen.sampling.temperature == 0.0:
            raise ValueError(
                f"{self!r}: without a temperature each of the retries gives the same text: set "
                "one, or let the model know what was wrong with reask=True"
            )
        return gen


class SelectExpr(ValueExpr[T_co], eq=False, gc=False):
    """A `select`."""

    _select: Select

    @property
    def name(self) -> str:
        """The name that the value can be read by; '' for none."""
        return self._select.name

    def op(self, defaults: SamplingParams | None) -> Select:
        """Return the operation."""
        return self._select


class LazyValue(Expr):
    """A reference to text that nodes of a run will have made; made by `s.var`."""

    __slots__ = ("label", "nodes", "run")

    def __init__(self, run: Run, nodes: tuple[int, ...], label: str) -> None:
        self.run = run
        self.nodes = nodes
        self.label = label

    def __repr__(self) -> str:
        return f"var({self.label!r})"

    def __bool__(self) -> bool:
        self._refuse_read("its truth")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        self._refuse_read("a comparison")

    __hash__ = object.__hash__

    def _refuse_read(self, what: str) -> NoReturn:
        raise ProgramError(f"{what} needs the value of {self!r}: read it with s[{self.label!r}]")


class RoleMark(Expr):
    """Opens or closes a turn."""

    __slots__ = ("edge", "role")

    def __init__(self, role: str, edge: Literal["begin", "end"]) -> None:
        if not isinstance(role, str):
            raise TypeError(f"a turn's role is a string, not {type(role).__name__}")
        self.role = role
        self.edge = edge

    def __repr__(self) -> str:
        return f"{self.role}_{self.edge}()"


def parts_of(part: Part) -> Sequence[Part]:
    """Return the single parts of an expression, in order."""
    return part.parts if isinstance(part, Concat) else (part,)
