"""What the graph executor and its tasks ask of the engine; knows neither of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .kv_cache import Holds
from .prompt_scores import PromptScores
from .request import Request


class PrefixRoom(NamedTuple):
    """Where shared prefixes are kept."""

    page_size: int  # tokens that are kept together
    num_tokens: int  # of the whole pool; 0 where nothing is shared


class RequestQueue(Protocol):
    """Takes requests, and commands for the thread that the executor lives on."""

    @property
    def holds(self) -> Holds:
        """What live programs hold of the cache."""
        ...

    @property
    def prefix_room(self) -> PrefixRoom:
        """The room that shared prefixes have."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestRejectedError."""
        ...

    def score_prompt(self, scores: PromptScores, request: Request) -> None:
        """Begin to find the log-probabilities of the prompt that a queued request will compute."""
        ...

    def finish(self, request: Request, keep: Sequence[int]) -> None:
        """Release a request's KV but for the rows in `keep`."""
        ...

    def abort(self, request: Request) -> None:
        """Release a request in whatever state it is."""
        ...

    def post_if_running(self, command: Callable[[], None]) -> None:
        """Run a command on the engine's thread, from any thread; drop it after the end."""
        ...
