"""What every backend must do, and how it says what it can't; knows no backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from umbel.lang.graph import RequestGraph
from umbel.lang.results import Event, RunOptions

EventSink = Callable[[Sequence[Event]], None]
TokenCounter = Callable[[str], int]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend honours; the interpreter refuses the rest before the first token.

    `token_native` backends follow the token rules (6, 9 to 11, 16) of the semantics. `trunks` asks
    for `RunOptions.trunk`, and `verbatim` for graphs as the program wrote them, without passes.
    """

    token_native: bool = False
    roles: bool = True
    regex: bool = False
    json_schema: bool = False
    grammar: bool = False
    choices: bool = False
    select_methods: frozenset[str] = frozenset()
    n_samples: bool = True
    logprobs: bool = False
    prompt_logprobs: bool = False
    heal: bool = False
    thinking: bool = False
    seed: bool = False
    stop_regex: bool = False
    join_append: bool = True
    trunks: bool = False
    verbatim: bool = False


class Session(Protocol):
    """One run on a backend: a graph that grows until it is closed.

    Every node handed in gets exactly one terminal event (NodeFinished or NodeFailed), whatever
    happens: failure, cancellation, a lost connection, the backend's shutdown. Events are delivered
    to the sink in order, from any thread but never from inside `extend` of the same session.
    """

    def extend(self, piece: RequestGraph) -> None:
        """Hand over more of the graph; returns at once. Raises what can be refused at once."""
        ...

    def cancel(self, nodes: Sequence[int] | None = None) -> None:
        """Stop nodes (all, by default) that have not ended; they end as failed (CancelledError)."""
        ...

    def close(self) -> None:
        """Promise that no more pieces come; what is running goes on to its end. Idempotent."""
        ...


class Backend(Protocol):
    """Runs request graphs."""

    name: str
    capabilities: Capabilities

    @property
    def token_counter(self) -> TokenCounter | None:
        """What counts the tokens of a literal text, where the tokenizer is in this process."""
        ...

    def open(self, options: RunOptions, sink: EventSink) -> Session:
        """Start a run; its events go to `sink`."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Return the backend's counters by name; empty where it keeps none."""
        ...

    def close(self) -> None:
        """Stop: unfinished nodes fail with EngineStoppedError or BackendError. Idempotent."""
        ...


@runtime_checkable
class CacheOwner(Protocol):
    """A backend with a prefix cache that it can empty, as a cold measurement wants."""

    def reset_cache(self) -> int:
        """Forget every cached prefix and return how many slots came free.

        Raises EngineError while something runs.
        """
        ...
