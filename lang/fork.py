"""Branches of a state and what comes back when they are joined; runs nothing itself."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, overload

from .bindings import text_at
from .errors import GenerationError, ProgramError, UmbelError
from .expressions import Part, ValueExpr
from .ir import Join, JoinMode, JoinPolicy, RoleStart

if TYPE_CHECKING:
    from .state import State


class _Missing:
    """The value of a name that a branch did not write."""

    def __repr__(self) -> str:
        return "MISSING"

    def __bool__(self) -> bool:
        return False


MISSING: Final = _Missing()


class Forks(Sequence["State"]):
    """The branches of one fork, in order. `forks += x` appends to each of them.

    As a context manager it joins at the end of the block, unless that was done before.
    """

    def __init__(self, parent: State, branches: tuple[State, ...]) -> None:
        self._parent = parent
        self._branches = branches
        self._joined = False

    def __len__(self) -> int:
        return len(self._branches)

    @overload
    def __getitem__(self, index: int) -> State: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[State]: ...
    def __getitem__(self, index: int | slice) -> State | Sequence[State]:
        if isinstance(index, str | ValueExpr):
            raise TypeError(
                "branches are read one by one (forks[0][name]) or, joined, together: "
                "joined = forks.join(), then joined[name]"
            )
        if isinstance(index, int) and not -len(self) <= index < len(self):
            raise IndexError(f"the fork has {len(self)} branches, so none of index {index}")
        return self._branches[index]

    def __setitem__(self, index: int, branch: State) -> None:
        """Allow ``forks[i] += x``, which appends in place; raises TypeError for another state."""
        if branch is not self._branches[index]:
            raise TypeError("a branch can't be replaced, only appended to")

    def __iadd__(self, item: Part) -> Forks:
        for branch in self._branches:
            branch += item
        return self

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and not self._joined:
            self.join()

    def join(
        self, policy: JoinPolicy = "all", mode: JoinMode = "gather", k: int | None = None
    ) -> Joined:
        """End the fork and return its branches' values, one entry per branch in branch order.

        Nothing waits here, but for gens with `retries`: what comes back is read like a state.
        Policy `all` fails the parent when a branch fails, and says which; `collect` puts errors in
        place; `any` goes on when `k` branches (1, if not said) have finished and cancels the rest.
        Mode `append` appends the branches' texts to the parent, in branch order. The branches can
        be read afterwards, not appended to.

        Raises ProgramError for a second join, ValueError for a policy, mode or k without meaning.
        """
        if policy not in ("all", "collect", "any"):
            raise ValueError(f"policy must be 'all', 'collect' or 'any', not {policy!r}")
        if mode not in ("gather", "append"):
            raise ValueError(f"mode must be 'gather' or 'append', not {mode!r}")
        if k is not None and policy != "any":
            raise ValueError(f"k belongs to policy 'any', not {policy!r}")
        if k is not None and not 1 <= k <= len(self):
            raise ValueError(f"k must be from 1 to {len(self)}, not {k}")
        if self._joined:
            raise ProgramError("the branches were joined already")
        parent = self._parent
        if parent._closed or parent._unpicked:
            parent._refuse_append()
        for i, branch in enumerate(self._branches):
            branch.settle()
            self._check(i, branch, mode)
        tails = tuple(b._tail for b in self._branches if b._tail is not None)
        node = parent._add(Join(tails, policy, mode, k or 1))
        for branch in self._branches:
            branch._closed = branch._closed or "the branch was joined"
        self._joined = True
        return Joined(parent, node, self._branches, policy)

    def _check(self, index: int, branch: State, mode: JoinMode) -> None:
        if branch._captures != self._parent._captures:
            raise ProgramError(f"branch {index} has an open capture: close it before the join")
        if mode == "gather":
            return
        if branch._unpicked:
            raise ProgramError(f"branch {index} has samples to pick from before the join")
        nodes = branch._run.nodes
        if any(isinstance(nodes[i].op, RoleStart) for i in branch._own_nodes()):
            raise ProgramError(
                f"branch {index} opened a turn: mode 'append' appends plain text only; use 'gather'"
            )


class Joined(Sequence[Any]):
    """What a join gives: one entry per branch, in branch order, read when they are needed.

    `joined[i]` is branch i's state, and `joined["name"]` the list of the branches' values.
    Branches that did not write the name give MISSING. Where errors are collected, a failed
    branch's entry is its error.
    """

    def __init__(
        self, parent: State, node: int, branches: tuple[State, ...], policy: JoinPolicy
    ) -> None:
        self._parent = parent
        self._node = node
        self._branches = branches
        self._collects = policy != "all"

    def __len__(self) -> int:
        return len(self._branches)

    @overload
    def __getitem__(self, key: int) -> Any: ...
    @overload
    def __getitem__(self, key: slice | str | ValueExpr[Any]) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str | ValueExpr[Any]) -> Any:
        if isinstance(key, str | ValueExpr):
            self._parent._run.result(self._node)
            return [self._value(branch, key) for branch in self._branches]
        if isinstance(key, slice):
            return [self[i] for i in range(*key.indices(len(self)))]
        branch = self._branches[key]
        if not self._collects:
            return branch
        self._parent._run.result(self._node)
        return self._error(branch) or branch

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __await__(self) -> Generator[Any, Any, list[Any]]:
        """Wait for the join without blocking the event loop; returns the list of entries."""
        yield from self._parent._run.aresult(self._node).__await__()
        return list(self)

    async def get(self, key: str | ValueExpr[Any]) -> list[Any]:
        """Wait for the join without blocking the event loop; returns what `joined[key]` does."""
        await self
        return self[key]

    @property
    def errors(self) -> list[UmbelError | None]:
        """Each branch's error, None where it finished; waits for the join."""
        self._parent._run.result(self._node)
        return [self._error(branch) for branch in self._branches]

    def texts(self) -> list[Any]:
        """Return what each branch wrote itself; an error in place where errors are collected."""
        self._parent._run.result(self._node)
        return [
            self._error(branch) or "".join(text_at(branch._run, i) for i in branch._own_nodes())
            for branch in self._branches
        ]

    def _error(self, branch: State) -> UmbelError | None:
        return None if branch._tail is None else branch._run.failure(branch._tail)

    def _value(self, branch: State, key: str | ValueExpr[Any]) -> Any:
        error = self._error(branch)
        if error is not None and self._collects:
            return error
        if key not in branch:
            return MISSING
        try:
            return branch[key]
        except GenerationError as failed:
            if not self._collects:
                raise
            return failed
