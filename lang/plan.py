"""What a program will cost before it runs, and what it did cost after: data, drawn elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .graph import GraphNode, RequestGraph
from .ir import Gen, Select
from .results import Usage


@dataclass(frozen=True, slots=True)
class Bounds:
    """The least and the most that a count can come to."""

    low: int = 0
    high: int = 0

    def __add__(self, other: Bounds) -> Bounds:
        return Bounds(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: int) -> Bounds:
        return Bounds(self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,}–{self.high:,}"  # noqa: RUF001


NOTHING = Bounds()
NO_USAGE = Usage()


@dataclass(frozen=True, slots=True)
class ConstraintSize:
    """A constraint in numbers; `max_bytes` is None where its values have no longest one."""

    kind: Literal["regex", "schema", "grammar", "choices"]
    num_chars: int  # of the constraint as written
    max_bytes: int | None = None  # of a value
    num_choices: int = 0

    def __str__(self) -> str:
        if self.kind == "choices":
            return counted(self.num_choices, "choice")
        written = f"{self.kind} of {counted(self.num_chars, 'character')}"
        if self.max_bytes is None:
            return written
        return f"{written}, values up to {counted(self.max_bytes, 'byte')}"


@dataclass(frozen=True, slots=True)
class Actual:
    """How a node ended. Times are seconds; `start` counts from the moment the run's first node
    was ready. They are 0 where a backend does not tell them.
    """

    status: Literal["finished", "failed"]
    text: str = ""
    error: str = ""
    usage: Usage = NO_USAGE
    start: float = 0.0
    queued: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """What one node costs when all that paths share is computed once.

    `prompt` is the row in front of it. `appended` is what it adds to that row, `prefill` how much
    of this is computed without sampling (for a select: its choices), and `decode` what is sampled
    (over all samples). `num_paths` sequences run through the node; without sharing each of them
    would compute what it appended, which is `saved`.
    """

    node: GraphNode
    prompt: Bounds
    appended: Bounds
    prefill: Bounds
    decode: Bounds
    num_paths: int
    saved: Bounds
    constraint: ConstraintSize | None = None
    actual: Actual | None = None

    @property
    def needs_model(self) -> bool:
        """Whether the node runs on the model itself; other nodes are only read by it."""
        return needs_model(self.node)

    @property
    def name(self) -> str:
        """The name its value is read by, or ''."""
        return self.node.op.name if isinstance(self.node.op, Gen | Select) else ""


@dataclass(frozen=True, slots=True)
class Plan(ABC):
    """The cost of a graph, node by node and in all; after a run, the actual cost too.

    `is_estimate` says that literal text was counted as a quarter of its characters. Each text is
    counted by itself: the tokens that a tokenizer makes across their borders are not foreseen, and
    turn borders count nothing, since how they are written is the model's own affair.
    `critical_path` is the chain of nodes that takes longest: by sampled tokens before a run, by
    seconds after one.
    `critical_steps` bounds the forward passes that must follow each other along it. `num_retries`
    counts the runs that failed before this one; of them nothing else is in the plan.
    """

    graph: RequestGraph
    nodes: tuple[NodePlan, ...]
    is_estimate: bool
    critical_path: tuple[int, ...]
    critical_steps: Bounds
    num_retries: int = 0

    @property
    def prefill(self) -> Bounds:
        """Tokens computed without sampling."""
        return sum((node.prefill for node in self.nodes), NOTHING)

    @property
    def decode(self) -> Bounds:
        """Tokens sampled."""
        return sum((node.decode for node in self.nodes), NOTHING)

    @property
    def saved(self) -> Bounds:
        """Tokens that shared prefixes save over running each path alone."""
        return sum((node.saved for node in self.nodes), NOTHING)

    @property
    def num_paths(self) -> int:
        """Sequences that end in a gen or select."""
        return sum(node.num_paths for node in self.nodes if node.node.parent is None)

    @property
    def has_run(self) -> bool:
        """Whether any node has ended."""
        return any(node.actual is not None for node in self.nodes)

    @property
    def usage(self) -> Usage:
        """Tokens that the nodes which finished did take, in all."""
        found = [node.actual.usage for node in self.nodes if node.actual is not None]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in found),
            cached_tokens=sum(usage.cached_tokens for usage in found),
            completion_tokens=sum(usage.completion_tokens for usage in found),
            forced_tokens=sum(usage.forced_tokens for usage in found),
            tree_tokens=sum(usage.tree_tokens for usage in found),
        )

    @property
    def seconds(self) -> float:
        """Time from the moment the first node was ready to the last one's end."""
        found = [node.actual for node in self.nodes if node.actual is not None]
        return max((actual.start + actual.seconds for actual in found), default=0.0)

    @property
    def num_failed(self) -> int:
        """Nodes that failed, were cancelled, or depend on one that did."""
        return sum(
            node.actual is not None and node.actual.status == "failed" for node in self.nodes
        )

    @abstractmethod
    def draw(self, path: str | Path, *, title: str = "") -> Path:
        """Write the plan's picture and return its path.

        ``.html`` is one page that needs nothing else and opens in any browser; ``.mmd`` is a
        Mermaid flowchart. Raises ValueError for any other ending.
        """

    def __str__(self) -> str:
        about = "about " if self.is_estimate else ""
        lines = [
            f"{counted(len(self.nodes), 'node')}, {counted(self.num_paths, 'path')}; "
            f"prefill {about}{self.prefill}, decode {self.decode}, "
            f"saved by sharing {about}{self.saved} tokens; "
            f"longest chain {self.critical_steps} steps"
        ]
        if self.has_run:
            usage = self.usage
            sampled = counted(usage.completion_tokens, "token")
            prompts = counted(usage.prompt_tokens, "prompt token")
            failed = f"; {counted(self.num_failed, 'node')} failed" if self.num_failed else ""
            lines.append(
                f"  it ran {self.seconds:.2f} s, sampled {sampled} and found "
                f"{usage.cached_tokens:,} of {prompts} in the cache{failed}"
            )
        for plan in self.nodes:
            if plan.needs_model:
                kind = type(plan.node.op).__name__.lower()
                lines.append(
                    f"  {plan.node.address}  {kind} {plan.name or '-'}: prompt {about}{plan.prompt}"
                    f", decode {plan.decode}"
                    + (f", {plan.constraint}" if plan.constraint is not None else "")
                )
        return "\n".join(lines)


def needs_model(node: GraphNode) -> bool:
    """Say whether a node runs on the model itself; other nodes are only read by it."""
    op = node.op
    return isinstance(op, Gen) or (isinstance(op, Select) and len(op.choices) > 1)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
