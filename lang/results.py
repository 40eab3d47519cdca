"""What comes back from a backend: one result per node, and the events that carry them."""

from __future__ import annotations

from typing import Literal

import msgspec

from .errors import WireError
from .graph import RequestGraph

FinishReason = Literal["stop", "length", "cancelled"]


class Usage(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Token counts of one node. `cached_tokens` of the prompt were found in the cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0  # sampled
    forced_tokens: int = 0  # of these, appended without sampling
    tree_tokens: int = 0  # nodes of a select's token tree


class Timings(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Seconds on the monotonic clock of the backend's process; 0.0 where it did not happen."""

    ready: float = 0.0
    scheduled: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


class TokenLogprob(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Log-probability of one token, with the most likely alternatives.

    `text` is the token's own, `top_texts` those of the alternatives, where the backend tells them:
    bytes that are no whole character read U+FFFD, and a special token has no text.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str = ""
    top_texts: tuple[str, ...] = ()


class ChoiceScore(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One row of a select's table; logprobs are after the scored context."""

    choice: str
    token_ids: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    sum: float
    mean: float
    per_byte: float
    probability: float
    score: float = 0.0  # by the select's method
    unconditional_logprobs: tuple[float, ...] = ()


class Thinking(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What a model thought before a value.

    `text` is the block without its marks. `num_tokens` counts the first ids of the sample: the
    block with its end, before which the value does not begin. The reason is "length" where the
    block was ended because it had used its tokens.
    """

    text: str
    num_tokens: int = 0
    finish_reason: FinishReason = "stop"


class Sample(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """One generated sample. `token_ids` are all sampled ids; the first `num_kept` stay in the row.

    `residue` is the end of `text` that no kept token covers (a stop inside a token); it joins the
    next literal run. `num_replaced` counts the prompt's last tokens whose place the kept ones take
    (token healing): their text comes before `text`, and is no part of it.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    num_kept: int = 0
    residue: str = ""
    num_replaced: int = 0
    finish_reason: FinishReason = "stop"
    matched_stop: str | int | None = None
    accepting: bool = True  # the constraint is satisfied (True where there is none)
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    thinking: Thinking | None = None


class NodeResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What a finished node made. `text` is what it appended ('' for a gather join).

    `default_system` is the system turn that the model's template added before the turn that a
    RoleStart opened; it is part of the prompt, and of no text.
    """

    text: str = ""
    samples: tuple[Sample, ...] = ()  # of a Gen
    scores: tuple[ChoiceScore, ...] = ()  # of a Select
    branch_errors: tuple[WireError | None, ...] = ()  # of a Join with policy collect or any
    grammar_engine: str = ""
    usage: Usage = Usage()
    timings: Timings = Timings()
    default_system: str = ""


class NodeStarted(msgspec.Struct, frozen=True, gc=False, tag="started"):
    """A node that needs the model began to run."""

    node: int


class TextDelta(msgspec.Struct, frozen=True, gc=False, tag="delta"):
    """More text of a running Gen's first sample; deltas concatenate to its text."""

    node: int
    text: str


class NodeFinished(msgspec.Struct, frozen=True, gc=False, tag="finished"):
    """A node's result: its terminal event."""

    node: int
    result: NodeResult


class NodeFailed(msgspec.Struct, frozen=True, gc=False, tag="failed"):
    """A node failed, was cancelled, or depends on one that did: its terminal event."""

    node: int
    error: WireError


Event = NodeStarted | TextDelta | NodeFinished | NodeFailed


class RunOptions(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What a backend is told once per run. `row` is the index in a batch, `attempt` counts retries.

    All three of `seed`, `row` and `attempt` go into the nodes' seeds (`graph.node_seed`).
    `is_whole` promises that the first piece is the whole graph; without it a run may grow.
    `trunk` is what the run's graph and other rows of its batch begin with: nodes whose text is
    known before anything runs, the last of them perhaps the beginning of the graph's own. A backend
    may compute it early and keep it, or ignore it.
    """

    seed: int = 0
    row: int = 0
    priority: int = 0
    timeout: float | None = None  # seconds from the moment the run is opened
    attempt: int = 0
    is_whole: bool = False
    trunk: RequestGraph | None = None
