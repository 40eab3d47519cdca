"""The object a program writes to: records nodes, reads values, forks; runs nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .append_checks import check_parts, check_place, pick_first, user_line
from .bindings import (
    Binding,
    CaptureBinding,
    ListBinding,
    ValueBinding,
    bound_again,
    label_of,
    meta_in,
    moved,
    nodes_of,
    text_at,
    texts_in,
    value_in,
)
from .errors import ProgramError, UnknownNameError
from .expressions import Expr, GenExpr, LazyValue, Part, RoleMark, ValueExpr, parts_of
from .ir import Branch, Gen, Op, Pick, Ref, RoleEnd, RoleStart, Select, Text
from .retries import Attempts
from .runner import Run
from .sampling_params import SamplingParams
from .transcript import Message, messages_of, path_to

if TYPE_CHECKING:
    from .fork import Forks
    from .graph import GraphNode

T = TypeVar("T")


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

    # One flat object: results keep their states, thousands at a time, and each garbage collection
    # would walk every part that a state had.
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
        self._bound: dict[str | ValueExpr[Any], Binding] = {}
        self._cache: dict[Binding, Any] | None = None  # decoded values: a state's own objects
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
            check_place(item, self._role)
            self._add_value(item)
        elif isinstance(item, str | Expr):
            parts = parts_of(item)
            check_parts(parts, self._run, self._role, self._role_line)
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
        self._bind(name, CaptureBinding(self._nodes_after(start)), append=append)

    def pick(self, name: str | ValueExpr[Any], sample: int) -> State:
        """Go on with one sample of the `gen` with n > 1 that was just appended."""
        binding = self._lookup(name)
        label = label_of(name)
        if (
            not isinstance(binding, ValueBinding)
            or binding.node != self._tail
            or not self._unpicked
        ):
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
        value = ValueBinding(node, expr)
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
            self._bound[key] = moved(binding, old, new)

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

    def _bind(self, name: str, value: ValueBinding | CaptureBinding, *, append: bool) -> None:
        self._bound[name] = bound_again(name, self._bound.get(name), value, append=append)

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
            self._role, self._role_line = mark.role, user_line()
        elif self._unpicked or self._unchecked is not None:
            self._deferred_end = mark.role
        else:
            self._add(RoleEnd(mark.role))
            self._role = ""

    def _refuse_append(self) -> None:
        if self._closed:
            raise ProgramError(f"nothing can be appended: {self._closed}")
        raise ProgramError(pick_first(self._unpicked))

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
        for node in nodes_of(binding):
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
        if isinstance(binding, ListBinding):
            raise ProgramError(f"{label_of(key)!r} is a list: refer to a name that stands for one")
        if isinstance(binding, ValueBinding) and binding.expr.num_samples > 1:
            raise ProgramError(f"{label_of(key)!r} has several samples, so no one text to refer to")
        nodes = (
            (binding.node,) if isinstance(binding, ValueBinding) else texts_in(self._run, binding)
        )
        return LazyValue(self._run, nodes, label_of(key))

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
        if isinstance(binding, ListBinding):
            return [meta_in(self._run, item, label_of(key)) for item in binding.items]
        return meta_in(self._run, binding, label_of(key))

    def names(self) -> list[str]:
        """Return the names that can be read here."""
        return [key for key in self._bound if isinstance(key, str)]

    def _lookup(self, key: str | ValueExpr[Any]) -> Binding:
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
        hint = _hint_at_branch(key, self._run.nodes, self._prefix)
        raise UnknownNameError(f"nothing is named {key!r} here; names so far: {known}{hint}")

    def _read(self, binding: Binding) -> Any:
        if isinstance(binding, ListBinding):
            return [self._read(item) for item in binding.items]
        if self._cache is None:
            self._cache = {}
        if binding not in self._cache:
            self._cache[binding] = value_in(self._run, binding)
        return self._cache[binding]

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
        return [(node, text_at(self._run, node.id)) for node in path]

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


def _merged(parts: list[str | Ref]) -> tuple[str | Ref, ...]:
    merged: list[str | Ref] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, str) and isinstance(last, str):
            merged[-1] = last + part
        else:
            merged.append(part)
    return tuple(merged)


def _hint_at_branch(name: str, nodes: Sequence[GraphNode], prefix: str) -> str:
    """Say how to read a name that a branch below the state with this prefix wrote."""
    for node in nodes:
        below = node.address.removeprefix(prefix)
        is_below = node.address.startswith(prefix) and ".fork" in below
        if is_below and isinstance(node.op, Gen | Select) and node.op.name == name:
            return (
                f". A branch wrote it, at {node.address}: read the branch, as in "
                f"branches[0][{name!r}], or what branches.join() returns"
            )
    return ""
