"""What a run gives back: text, named values, the body's return value; never waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from .expressions import ValueExpr
from .plan import Plan
from .runner import current_runner
from .transcript import Message

if TYPE_CHECKING:
    from .state import State

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class Result(Generic[R_co]):
    """A run that has ended.

    `error` is why it failed; reads of what a failed node should have made raise, and so do reads of
    a typed value that was cut by max_tokens, which is no `error` of the run unless the body reads
    it. `seed` repeats the run's random choices: ``program.options(seed=result.seed)``. It is the
    whole batch's seed for a row of one, each row drawing by its index: repeat the batch. `attempt`
    counts the runs of that row that failed before this one and were retried.
    """

    __slots__ = ("_value", "attempt", "error", "row", "seed", "state")

    def __init__(
        self,
        state: State | None,
        value: R_co | None,
        error: BaseException | None = None,
        *,
        row: int = 0,
        seed: int = 0,
        attempt: int = 0,
    ) -> None:
        self.state = state
        self._value = value
        self.error = error
        self.row = row  # index in the batch
        self.seed = seed
        self.attempt = attempt

    @property
    def value(self) -> R_co:
        """What the program's body returned; raises the run's error if there was one."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]  # None only where the body failed

    @overload
    def __getitem__(self, key: ValueExpr[T]) -> T: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __getitem__(self, key: str | ValueExpr[Any]) -> Any:
        return self._need()[key]

    def __contains__(self, key: object) -> bool:
        return self.state is not None and key in self.state

    def text(self) -> str:
        """Return the whole text that the program wrote, without turn borders."""
        return self._need().text()

    @property
    def messages(self) -> list[Message]:
        """The turns that the program wrote."""
        return self._need().messages

    def meta(self, key: str | ValueExpr[Any]) -> Any:
        """Return what is known of a value; see `State.meta`."""
        return self._need().meta(key)

    def plan(self) -> Plan:
        """Return the plan of all that the run did, with what each node did cost.

        Raises the run's error when it failed before it had a state.
        """
        return current_runner().plan_result(self)

    def names(self) -> list[str]:
        """Return the names that can be read."""
        return [] if self.state is None else self.state.names()

    def __repr__(self) -> str:
        end = f"error={self.error!r}" if self.error is not None else f"value={self._value!r}"
        return f"Result(row={self.row}, names={self.names()}, {end})"

    def _need(self) -> State:
        if self.state is None:
            assert self.error is not None, "a result has a state or an error"
            raise self.error
        return self.state
