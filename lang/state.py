"""The object a program writes to: records nodes, reads values, forks; runs nothing itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

from .choice_scoring import beginning_choice
from .errors import ConstraintError, ProgramError, UnknownNameError
from .expressions import Expr, GenExpr, LazyValue, Part, RoleMark, SelectExpr, ValueExpr, parts_of
from .ir import Branch, Op, Pick, Ref, RoleEnd, RoleStart, Text
from .results import NodeResult
from .retries import Attempts
from .runner import Run
from .sampling_params import SamplingParams
from .transcript import (
    Message,
    NodeMeta,
    appended_text,
    messages_of,
    meta_of,
    path_to,
    value_of,
)

if TYPE_CHECKING:
    from .fork import Forks

T = TypeVar("T")
_HERE = str(Path(__file__).parent.parent)  # all of umbel: other languages build on states


# without cycles and never compared: left out of garbage collection, since results keep many
class _Value(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A name or handle that stands for one gen or select."""

    node: int
    expr: ValueExpr[Any]


class _Capture(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A name that stands for the text of several nodes."""

    nodes: tuple[int, ...]


class _Items(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A name that stands for a list: all that was written with append=True."""

    items: tuple[_Value | _Capture, ...]


_Binding = _Value | _Capture | _Items


class State:
    """A sequence of text that a program extends, and the values named on the way.

    `s += x` appends a string, a primitive, or several joined with `+`; it is checked on that line
    and runs later. `s["name"]`, `s[handle]` and `s.text()` wait for what they need and for nothing
    else; in an `async def` program wait with `await s.get(...)` or `await s.wait()` first.

    A gen with `retries` is looked at when something follows it: in an `async def` program wait for
    it first. A name that is written again stands for the latest value; what was written with
    `append=True` is a list. Names of a parent can be read in its branches, never the other way
    round.
    """

    __slots__ = (
        "_bound",
        "_cache",
        "_captures",
        "_closed",
        "_defaults",
        "_deferred_end",
        "_first",
        "_forks_at",
        "_position",
        "_prefix",
        "_role",
        "_role_line",
        "_run",
        "_tail",
        "_text_run",
        "_unchecked",
        "_unpicked",
    )

    def __init__(self, run: Run, defaults: SamplingParams | None = None) -> None:
        self._run = run
        self._defaults = defaults
        self._tail: int | None = None
        self._prefix = ""  # of the addresses of this state's nodes
        self._position = 0  # of the next node that is not text after text
        self._text_run = 0  # texts in a row so far: appending in pieces moves no later address
        self._forks_at = (0, 0)  # position, number of forks made there
        self._first: int | None = None  # a branch's Branch node
        self._bound: dict[str | ValueExpr[Any], _Binding] = {}
        self._cache: dict[_Binding, Any] | None = None  # decoded values: a state's own objects
        self._captures: tuple[str, ...] = ()  # names of the open capture blocks
        self._role = ""  # the open turn
        self._role_line = ""
        self._unpicked = ""  # a gen with n > 1 that nothing was picked from yet
        self._unchecked: Attempts | None = None  # a gen with retries that was not looked at yet
        self._deferred_end = ""  # the turn that closes once something is picked, or looked at
        self._closed = ""  # why nothing can be appended any more

    # --- appending -------------------------------------------------------------------------

    def __iadd__(self, item: Part) -> State:
        if self._closed or self._unpicked:
            self._refuse_append()
        if self._unchecked is not None:
            self.settle()
        if type(item) is str:
            self._add_text((item,))
        elif isinstance(item, ValueExpr):
            _check_place(item, self._role)
            self._add_value(item)
        elif isinstance(item, str | Expr):
            parts = parts_of(item)
            self._check_parts(parts)
            self._add_parts(parts)
        else:
            raise TypeError(
                f"a state takes strings and expressions (gen, select, turns, s.var), "
                f"not {type(item).__name__}: {item!r}"
            )
        return self

    def __add__(self, item: Part) -> State:
        raise ProgramError(f"a state is appended to in place: write s += {item!r}")

    def __radd__(self, item: Part) -> State:
        raise ProgramError(f"a state can't be appended to {item!r}: write s += ..., or s.text()")

    def role(self, name: str, expr: Part | None = None) -> Any:
        """Append a whole turn, or open one for a `with` block when no expression is given."""
        if expr is None:
            return self._turn(name)
        self += RoleMark(name, "begin")
        self += expr
        self += RoleMark(name, "end")
        return self

    def system(self, expr: Part | None = None) -> Any:
        """Append a system turn, or open one: ``with s.system(): ...``."""
        return self.role("system", expr)

    def user(self, expr: Part | None = None) -> Any:
        """Append a user turn, or open one: ``with s.user(): ...``."""
        return self.role("user", expr)

    def assistant(self, expr: Part | None = None) -> Any:
        """Append an assistant turn, or open one: ``with s.assistant(): ...``."""
        return self.role("assistant", expr)

    @contextmanager
    def _turn(self, name: str) -> Iterator[State]:
        self += RoleMark(name, "begin")
        yield self
        self._append_end(name)

    def _append_end(self, name: str) -> None:
        is_open = self._unpicked or self._unchecked is not None
        if is_open and self._role == name and not self._deferred_end:
            self._deferred_end = name
        else:
            self += RoleMark(name, "end")

    @contextmanager
    def capture(self, name: str, *, append: bool = False) -> Iterator[State]:
        """Name the text of all that a `with` block appends. Blocks may nest."""
        if not isinstance(name, str):
            raise TypeError(f"a name is a string, not {type(name).__name__}")
        if name in self._captures:
            raise ProgramError(f"capture {name!r} is already open")
        self.settle()
        start = self._tail
        self._captures += (name,)
        try:
            yield self
        finally:
            self._captures = self._captures[:-1]
        self.settle()
        self._bind(name, _Capture(self._nodes_after(start)), append=append)

    def pick(self, name: str | ValueExpr[Any], sample: int) -> State:
        """Go on with one sample of the `gen` with n > 1 that was just appended."""
        binding = self._lookup(name)
        label = _label(name)
        if not isinstance(binding, _Value) or binding.node != self._tail or not self._unpicked:
            raise ProgramError(f"pick({label!r}): the last thing appended is no gen with n > 1")
        count = binding.expr.num_samples
        if not 0 <= sample < count:
            raise ProgramError(f"pick({label!r}, {sample}): samples are 0 to {count - 1}")
        self._unpicked = ""
        self._add(Pick(sample))
        if self._deferred_end:
            end, self._deferred_end = self._deferred_end, ""
            self += RoleMark(end, "end")
        return self

    def _add_text(self, parts: tuple[str | Ref, ...]) -> None:
        if self._text_run:
            address = f"{self._prefix}{self._position - 1}+{self._text_run}"
        else:
            address = f"{self._prefix}{self._position}"
            self._position += 1
        self._text_run += 1
        self._tail = self._run.add(Text(parts), address, self._tail)

    def _add(self, op: Op) -> int:
        node = self._run.add(op, f"{self._prefix}{self._position}", self._tail)
        self._position += 1
        self._text_run = 0
        self._tail = node
        return node

    def _add_value(self, expr: ValueExpr[Any]) -> None:
        node = self._add(expr.op(self._defaults))
        if self._run.exprs is not None:
            self._run.exprs[node] = expr
        value = _Value(node, expr)
        self._bound[expr] = value
        if expr.name:
            self._bind(expr.name, value, append=expr.append)
        if expr.num_samples > 1:
            self._unpicked = expr.name or repr(expr)
        elif isinstance(expr, GenExpr) and expr.retries:
            self._unchecked = Attempts(self, node, expr)

    def _rebind(self, old: int, new: int) -> None:
        """Let what stood for one attempt at a value stand for the next."""
        for key, binding in self._bound.items():
            self._bound[key] = _moved(binding, old, new)

    def settle(self) -> None:
        """Wait until a gen with retries that was appended last has its value; see `gen`."""
        if self._unchecked is not None:
            self._unchecked.settle()

    async def asettle(self) -> None:
        """Do the same without blocking the event loop."""
        if self._unchecked is not None:
            await self._unchecked.asettle()

    def _settled(self) -> None:
        """Go on behind a gen with retries."""
        self._unchecked = None
        end, self._deferred_end = self._deferred_end, ""
        if end:
            self += RoleMark(end, "end")

    def _bind(self, name: str, value: _Value | _Capture, *, append: bool) -> None:
        before = self._bound.get(name)
        if before is not None and append != isinstance(before, _Items):
            raise ProgramError(
                f"{name!r} was written {'without' if append else 'with'} append=True before: "
                "write it in one way"
            )
        if append:
            items = before.items if isinstance(before, _Items) else ()
            self._bound[name] = _Items((*items, value))
        else:
            self._bound[name] = value

    def _check_parts(self, parts: Sequence[Part]) -> None:
        """Refuse an expression as a whole, before any part of it is recorded."""
        role, line, unpicked = self._role, self._role_line, ""
        for part in parts:
            if isinstance(part, RoleMark):
                if part.edge == "begin":
                    if role:
                        raise ProgramError(
                            f"a new {part.role} turn can't open inside the {role} turn opened at "
                            f"{line or 'the same line'}: close that first"
                        )
                    role, line = part.role, ""
                elif role != part.role:
                    found = f"the open turn is {role}" if role else "no turn is open"
                    raise ProgramError(f"{part.role} turn can't be closed here: {found}")
                else:
                    role = ""
            elif unpicked:
                raise ProgramError(_pick_first(unpicked))
            elif isinstance(part, LazyValue) and part.run is not self._run:
                raise ProgramError(f"{part!r} belongs to another run")
            elif isinstance(part, ValueExpr):
                _check_place(part, role)
                if part.num_samples > 1:
                    unpicked = part.name or repr(part)

    def _add_parts(self, parts: Sequence[Part]) -> None:
        pending: list[str | Ref] = []
        for part in parts:
            if isinstance(part, str):
                pending.append(part)
                continue
            if isinstance(part, LazyValue):
                pending += map(Ref, part.nodes)
                continue
            if pending:
                self.settle()
                self._add_text(_merged(pending))
                pending = []
            if isinstance(part, ValueExpr):
                self.settle()
                self._add_value(part)
            elif isinstance(part, RoleMark):
                self._add_mark(part)
            else:
                raise TypeError(f"{part!r} can't be appended")
        if pending:
            self.settle()
            self._add_text(_merged(pending))

    def _add_mark(self, mark: RoleMark) -> None:
        if mark.edge == "begin":
            self.settle()
            self._add(RoleStart(mark.role))
            self._role, self._role_line = mark.role, _user_line()
        elif self._unpicked or self._unchecked is not None:
            self._deferred_end = mark.role
        else:
            self._add(RoleEnd(mark.role))
            self._role = ""

    def _refuse_append(self) -> None:
        if self._closed:
            raise ProgramError(f"nothing can be appended: {self._closed}")
        raise ProgramError(_pick_first(self._unpicked))

    # --- reading ---------------------------------------------------------------------------

    @overload
    def __getitem__(self, key: ValueExpr[T]) -> T: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: str | ValueExpr[Any]) -> Any:
        return self._read(self._lookup(key))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str | ValueExpr) and key in self._bound

    @overload
    async def get(self, key: ValueExpr[T]) -> T: ...
    @overload
    async def get(self, key: str) -> Any: ...
    async def get(self, key: str | ValueExpr[Any]) -> Any:
        """Wait for a value without blocking the event loop, and return it."""
        await self.asettle()
        binding = self._lookup(key)
        for node in _nodes_of(binding):
            await self._run.aresult(node)
        return self._read(binding)

    async def wait(self) -> None:
        """Wait, without blocking the event loop, for all that was appended here so far."""
        await self.asettle()
        if self._tail is not None:
            await self._run.aresult(self._tail)

    def var(self, key: str | ValueExpr[Any]) -> LazyValue:
        """Return a reference to a value's text, for use in text, without waiting for it."""
        binding = self._lookup(key)
        if isinstance(binding, _Items):
            raise ProgramError(f"{_label(key)!r} is a list: refer to a name that stands for one")
        if isinstance(binding, _Value) and binding.expr.num_samples > 1:
            raise ProgramError(f"{_label(key)!r} has several samples, so no one text to refer to")
        nodes = (binding.node,) if isinstance(binding, _Value) else self._texts_in(binding)
        return LazyValue(self._run, nodes, _label(key))

    def text(self) -> str:
        """Return all text of this sequence so far, its parents' included, without turn borders."""
        return "".join(text for _, text in self._steps())

    @property
    def messages(self) -> list[Message]:
        """The turns so far, a system turn of the model's template first; no text outside turns."""
        steps = self._steps()
        messages = messages_of(steps)
        first = next((node.id for node, _ in steps if isinstance(node.op, RoleStart)), None)
        added = "" if first is None else self._run.result(first).default_system
        return [Message(role="system", content=added), *messages] if added else messages

    def meta(self, key: str | ValueExpr[Any]) -> Any:
        """Return what is known of a value: a NodeMeta; a list of them for a list."""
        binding = self._lookup(key)
        if isinstance(binding, _Items):
            return [self._meta(item, _label(key)) for item in binding.items]
        return self._meta(binding, _label(key))

    def names(self) -> list[str]:
        """Return the names that can be read here."""
        return [key for key in self._bound if isinstance(key, str)]

    def _lookup(self, key: str | ValueExpr[Any]) -> _Binding:
        self.settle()
        if isinstance(key, str) and key in self._captures:
            raise ProgramError(f"capture {key!r} is still open: read it after its block")
        found = self._bound.get(key)
        if found is not None:
            return found
        if not isinstance(key, str | ValueExpr):
            raise TypeError(f"values are read by name or handle, not by {key!r}")
        if isinstance(key, ValueExpr):
            raise UnknownNameError(f"{key!r} was not appended to this state")
        known = ", ".join(map(repr, self.names())) or "none"
        raise UnknownNameError(f"nothing is named {key!r} here; names so far: {known}")

    def _read(self, binding: _Binding) -> Any:
        if isinstance(binding, _Items):
            return [self._read(item) for item in binding.items]
        if self._cache is None:
            self._cache = {}
        if binding not in self._cache:
            if isinstance(binding, _Value):
                result = self._run.result(binding.node)
                node = self._run.nodes[binding.node]
                self._cache[binding] = value_of(node, result, binding.expr)
            else:
                self._cache[binding] = "".join(map(self._text_at, binding.nodes))
        return self._cache[binding]

    def _meta(self, binding: _Value | _Capture, label: str) -> NodeMeta:
        if isinstance(binding, _Capture):
            raise ProgramError(f"{label!r} is a capture of several nodes: it has no metadata")
        return meta_of(self._run.nodes[binding.node], self._run.result(binding.node))

    def _text_at(self, node: int) -> str:
        return appended_text(self._run.nodes[node], self._run.result(node))

    def _texts_in(self, capture: _Capture) -> tuple[int, ...]:
        """Return the nodes of a capture that can add text (turn borders and samples can't)."""
        nodes = self._run.nodes
        probe = NodeResult(text="x")
        return tuple(i for i in capture.nodes if appended_text(nodes[i], probe))

    def _nodes_after(self, start: int | None) -> tuple[int, ...]:
        """Return the nodes of this sequence that come after `start`, in order."""
        found = []
        at = self._tail
        while at != start and at is not None:
            found.append(at)
            at = self._run.nodes[at].parent
        return tuple(reversed(found))

    def _own_nodes(self) -> tuple[int, ...]:
        """Return the nodes that this state appended itself, its Branch node first."""
        before = None if self._first is None else self._run.nodes[self._first].parent
        return self._nodes_after(before)

    def _steps(self) -> list[tuple[Any, str]]:
        self.settle()
        if self._tail is None:
            return []
        self._run.result(self._tail)  # the last node's end is the end of all before it
        path = path_to(self._run.nodes, self._tail)
        return [(node, self._text_at(node.id)) for node in path]

    # --- forking ---------------------------------------------------------------------------

    def fork(self, n: int = 1) -> Forks:
        """Start n branches that each continue this sequence on their own; see `Forks.join`.

        Nothing runs twice: the branches share this sequence's prefix.

        >>> from umbel.lang import function, gen
        >>> @function
        ... def two(s):
        ...     s += "Name a colour: "
        ...     with s.fork(2) as branches:
        ...         branches += gen("colour")
        >>> [node.address for node in two.compile().nodes]
        ['0', '1.fork0[0]', '1.fork0[1]', '1.fork0[0].0', '1.fork0[1].0', '1']

        Raises ValueError for n < 1.
        """
        from .fork import Forks

        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"fork takes a whole number, not {n!r}")
        if n < 1:
            raise ValueError(f"fork({n}): a fork has at least 1 branch")
        return Forks(self, self._branches(n))

    def copy(self) -> State:
        """Return an independent continuation of this sequence, which is never joined."""
        return self._branches(1)[0]

    def cancel(self) -> None:
        """Stop what this state appended and has not ended; nothing can be appended afterwards."""
        self._run.cancel(self._own_nodes())
        self._closed = self._closed or "the state was cancelled"

    def _branches(self, n: int) -> tuple[State, ...]:
        if self._closed or self._unpicked:
            self._refuse_append()
        self.settle()
        position, count = self._forks_at
        count = count + 1 if position == self._position else 1
        self._forks_at = (self._position, count)
        gang = f"{self._prefix}{self._position}.fork{count - 1}"
        return tuple(self._branch(gang, index, n) for index in range(n))

    def _branch(self, gang: str, index: int, of: int) -> State:
        branch = State(self._run, self._defaults)
        address = f"{gang}[{index}]"
        branch._first = branch._tail = self._run.add(Branch(index, of, gang), address, self._tail)
        branch._prefix = f"{address}."
        branch._bound = dict(self._bound)
        branch._captures = self._captures
        branch._role, branch._role_line = self._role, self._role_line
        return branch


def _moved(binding: _Binding, old: int, new: int) -> _Binding:
    if isinstance(binding, _Value):
        return _Value(new, binding.expr) if binding.node == old else binding
    if isinstance(binding, _Items):
        items = (_moved(item, old, new) for item in binding.items)
        return _Items(tuple(item for item in items if not isinstance(item, _Items)))
    return binding


def _nodes_of(binding: _Binding) -> list[int]:
    if isinstance(binding, _Value):
        return [binding.node]
    if isinstance(binding, _Capture):
        return list(binding.nodes[-1:])
    return [node for item in binding.items for node in _nodes_of(item)]


def _label(key: str | ValueExpr[Any]) -> str:
    return key if isinstance(key, str) else key.name or repr(key)


def _merged(parts: list[str | Ref]) -> tuple[str | Ref, ...]:
    merged: list[str | Ref] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        else:
            merged.append(part)
    return tuple(merged)


def _check_place(expr: ValueExpr[Any], role: str) -> None:
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


def _pick_first(name: str) -> str:
    return f"{name!r} has several samples: choose one with s.pick(name, i) before going on"


def _user_line() -> str:
    """Return the place in the program that is running: the nearest frame outside umbel."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_HERE)
        or frame.f_code.co_filename.endswith("contextlib.py")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
