"""What an SGLang program writes to, and what its run gives back: an umbel state with its names.

Knows no backend: a run that is streamed hands in its stream, to wait for and to read from.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, NoReturn

from umbel.lang.errors import GenerationError, ProgramError, UmbelError, UnknownNameError
from umbel.lang.expressions import Concat, Expr, Part, ValueExpr, parts_of
from umbel.lang.fork import MISSING, Forks, Joined
from umbel.lang.primitives import role
from umbel.lang.state import State
from umbel.lang.transcript import Message

from ...stream import ThreadStream
from .meta_info import meta_info, running_meta_info


class _Gathered(NamedTuple):
    """A name that stands for a list: what the branches of a join wrote under it."""

    joined: Joined
    branches: Sequence[ProgramState]


class Record:
    """What a program keeps beside its text; shared by the body's state and the returned one."""

    def __init__(self) -> None:
        self.variables: dict[str, Any] = {}
        self.value: Any = None  # what the body returned

    def for_branch(self) -> Record:
        """Return a branch's own record: the same variables, but lists of its own."""
        made = Record()
        for name, value in self.variables.items():
            made.variables[name] = list(value) if type(value) is list else value
        return made


class ProgramState:
    """A sequence of text with variables; SGLang's names for `umbel.State`.

    Reads wait for what they need. The state of a streamed run waits for the run's end before it is
    read, but for `text_iter` and `text_async_iter`. Reads raise GenerationError, with the cause
    chained, where SGLang would hang or miss a key.
    """

    def __init__(
        self,
        state: State,
        record: Record | None = None,
        *,
        stream: ThreadStream | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._state = state
        self._record = record or Record()
        self._stream = stream
        self._error = error

    # --- writing ---------------------------------------------------------------------------

    def __iadd__(self, item: Part) -> ProgramState:
        self._settle()
        if isinstance(item, Expr):
            self._append(item)
        else:
            self._state += item
        return self

    def system(self, expr: Part | None = None) -> Any:
        """Append a system turn, or open one: ``with s.system(): ...``."""
        return self._turn("system", expr)

    def user(self, expr: Part | None = None) -> Any:
        """Append a user turn, or open one: ``with s.user(): ...``."""
        return self._turn("user", expr)

    def assistant(self, expr: Part | None = None) -> Any:
        """Append an assistant turn, or open one: ``with s.assistant(): ...``."""
        return self._turn("assistant", expr)

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """Name the text of all that a `with` block appends."""
        with self._state.capture(name):
            yield
        self._record.variables.pop(name, None)

    def set_var(self, name: str, value: Any) -> None:
        """Name a value; it stands until something of that name is appended."""
        self._settle()
        self._record.variables[name] = value

    def fork(
        self, size: int = 1, position_ids_offset: Sequence[int] | None = None
    ) -> ProgramStateGroup:
        """Start `size` branches. Positions always continue the parent's, whatever the offset.

        Raises ValueError for a size below 1, or another number of offsets.
        """
        self._settle()
        if position_ids_offset is not None and len(position_ids_offset) != size:
            raise ValueError(
                f"fork({size}) takes {size} position offsets, not {len(position_ids_offset)}"
            )
        return ProgramStateGroup(self, self._state.fork(size))

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[ProgramState]:
        """Yield one branch, and join it at the end of the block."""
        group = self.fork(1, position_ids_offset)
        yield group[0]
        group.join()

    # --- reading ---------------------------------------------------------------------------

    @property
    def ret_value(self) -> Any:
        """What the program's body returned."""
        self._settle()
        return self._record.value

    def text(self) -> str:
        """Return all text so far, without turn borders."""
        self._settle()
        return self._state.text()

    def messages(self) -> list[Message]:
        """Return the turns so far."""
        self._settle()
        return self._state.messages

    def sync(self) -> None:
        """Wait for all that was appended; a failure is told by reads and by `error`."""
        self.error()

    def error(self) -> BaseException | None:
        """Wait for all that was appended, and return why it failed."""
        try:
            self.text()
        except GenerationError as error:
            return self._error or error
        except Exception as error:
            if error is self._body_error():
                return error
            raise
        return self._error

    def get_var(self, name: str) -> Any:
        """Wait for a value and return it; a list where branches were joined, or for ``n > 1``.

        A branch that did not write the name counts as `umbel.MISSING` in the list.
        """
        self._settle()
        variables = self._record.variables
        if name not in variables:
            return self._state[name]
        value = variables[name]
        if isinstance(value, _Gathered):
            value.joined.texts()  # raises, and names the branch, if the join failed
            value = [b.get_var(name) if name in b else MISSING for b in value.branches]
            variables[name] = value
        return value

    def get_meta_info(self, name: str) -> Any:
        """Return SGLang's meta_info of a value; None for what no gen or select made."""
        self._settle()
        if name in self._record.variables:
            return None
        try:
            return meta_info(self._state.meta(name))
        except (UnknownNameError, GenerationError):
            raise
        except ProgramError:  # a var_scope has none
            return None

    def text_iter(self, var_name: str | None = None) -> Iterator[Any]:
        """Yield the text, or a variable's, while a streamed run goes on; else in one piece."""
        if self._stream is None:
            yield self.text() if var_name is None else self.get_var(var_name)
        elif var_name is None:
            yield from self._stream
        else:
            try:
                yield from self._stream.text(var_name)
            except UnknownNameError:  # no gen or select; a var_scope has its value at the end
                if var_name not in self:
                    raise
                yield self.get_var(var_name)

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """Do what `text_iter` does, on the running event loop, without blocking it.

        With `return_meta_data` a variable's chunks come as pairs with a meta_info, and the last
        pair, whose text is empty, has the complete one.
        """
        if self._stream is None:
            await self._state.wait()
            yield self.text() if var_name is None else self.get_var(var_name)
            return
        stream = self._stream.on_loop()
        if var_name is None:
            async for chunk in stream:
                yield chunk
            return
        async for chunk in stream.text(var_name):
            yield (chunk, running_meta_info()) if return_meta_data else chunk
        if return_meta_data:
            await stream.result()
            yield "", self.get_meta_info(var_name)

    @property
    def stream_executor(self) -> NoReturn:
        """Refuse: there is no executor behind a state, and what it did is done by the state."""
        raise ProgramError(
            "stream_executor is SGLang's own inside; a state itself has sync(), text(), get_var(), "
            "set_var(), get_meta_info(), fork() and `+=`"
        )

    def names(self) -> list[str]:
        """Return the names that can be read here."""
        self._settle()
        return list(dict.fromkeys((*self._state.names(), *self._record.variables)))

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: object) -> bool:
        self._settle()
        return name in self._record.variables or name in self._state

    def __repr__(self) -> str:
        try:
            return f"ProgramState({self.text()})"
        except UmbelError as error:
            return f"ProgramState(error={error!r})"

    # --- inside ----------------------------------------------------------------------------

    def _append(self, item: Expr) -> None:
        """Append an expression; after several samples go on with the first, as SGLang does."""
        pending: list[Part] = []
        for part in parts_of(item):
            pending.append(part)
            if isinstance(part, ValueExpr) and part.num_samples > 1:
                self._state += Concat(tuple(pending))
                self._state.pick(part, 0)
                pending = []
        if pending:
            self._state += Concat(tuple(pending))
        for part in parts_of(item):
            if isinstance(part, ValueExpr) and part.name:
                self._record.variables.pop(part.name, None)

    def _turn(self, name: str, expr: Part | None) -> Any:
        self._settle()
        if expr is None:
            block: AbstractContextManager[State] = self._state.role(name)
            return block
        self += role(name, expr)
        return self

    def _settle(self) -> None:
        """Wait for the end of a streamed run: until then its state is the body's alone."""
        if self._stream is None:
            return
        self._stream.wait()
        error = self._body_error()
        if error is not None:
            raise error

    def _body_error(self) -> BaseException | None:
        return None if self._stream is None else self._stream.body_error


class ProgramStateGroup:
    """The branches of one fork. ``group += x`` takes a part, a list of parts, or a function of i.

    What is not used of a branch costs nothing; branches need not be joined.
    """

    def __init__(self, parent: ProgramState, forks: Forks) -> None:
        self._forks = forks
        self.src_state = parent
        self.states = [ProgramState(branch, parent._record.for_branch()) for branch in forks]

    def join(self, mode: str = "gather_variable") -> None:
        """End the fork. Nothing waits here: what the parent gets is read when it is needed.

        ``gather_variable`` gives the parent the names that only branches wrote, as lists with one
        entry for each branch; ``concate_and_append`` appends the branches' texts in order. A failed
        branch fails the parent.
        """
        if mode == "concate_and_append":
            self._forks.join(mode="append")
            return
        if mode != "gather_variable":
            raise ValueError(
                f"mode must be 'gather_variable' or 'concate_and_append', not {mode!r}"
            )
        known = self.src_state.names()
        gathered = _Gathered(self._forks.join(), self.states)
        for state in self.states:
            for name in state.names():
                if name not in known:
                    self.src_state._record.variables[name] = gathered

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """Allow ``group[i] += x``; raises TypeError for another state."""
        if state is not self.states[index]:
            raise TypeError("a branch can't be replaced, only appended to")

    def __iadd__(self, item: Part | Sequence[Part] | Callable[[int], Part]) -> ProgramStateGroup:
        for i, (state, part) in enumerate(zip(self.states, self._parts(item), strict=True)):
            state += part(i) if callable(part) else part
        return self

    def _parts(self, item: Any) -> Sequence[Any]:
        if not isinstance(item, list | tuple):
            return [item] * len(self.states)
        if len(item) != len(self.states):
            raise ValueError(f"{len(item)} parts for {len(self.states)} branches")
        return item
