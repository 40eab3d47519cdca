"""What the graph executor keeps of a run: its state, its places in token rows, its tasks.

Data only; the executor and its tasks alone change it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from umbel.lang.errors import UmbelError
from umbel.lang.graph import GraphNode, node_seed
from umbel.lang.graph_state import GraphState
from umbel.lang.ir import Branch, Ref, Text
from umbel.lang.results import (
    ChoiceScore,
    Event,
    NodeResult,
    RunOptions,
    Sample,
    Timings,
    Usage,
)

from .gen_task import GenTask
from .grammar.matcher import CompiledGrammar
from .graph_readers import GraphReaders
from .healing import Healing
from .program_report import ProgramTimes
from .prompt_scores import PromptScores
from .request import Request
from .select_task import SelectTask
from .token_row import TokenRow

logger = logging.getLogger(__name__)

EventSink = Callable[[Sequence[Event]], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a path ends: its row (None after an unpicked n > 1), its depth, its fork.

    `starts_together`: what runs here should start with what runs in the fork's other branches.
    """

    row: TokenRow | None
    depth: int = 0
    gang: str = ""
    starts_together: bool = True

    def moved(self, row: TokenRow) -> Place:
        """Return the place behind more text."""
        return Place(row, self.depth, self.gang, self.starts_together)

    def deeper(self, row: TokenRow | None) -> Place:
        """Return the place behind a gen or select."""
        return Place(row, self.depth + 1, self.gang, self.starts_together)


@dataclass(slots=True, eq=False)
class NodeTask:
    """A Gen or Select that is compiling, waiting or running."""

    run: ProgramRun
    node: GraphNode
    place: Place
    row: TokenRow
    gens: list[GenTask] = field(default_factory=list)
    select: SelectTask | None = None
    grammar: CompiledGrammar | None = None
    healing: Healing | None = None
    scores: PromptScores | None = None  # of a gen's prompt, if it asked for them
    ready_s: float = 0.0
    queued_s: float = 0.0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    forced_tokens: int = 0
    is_ended: bool = False

    def requests(self) -> list[Request]:
        """Return the requests of this node, ended ones too."""
        if self.select is not None:
            return [tree.request for tree in self.select.trees]
        return [gen.request for gen in self.gens]

    def seed(self, own: int | None, sample: int) -> int:
        """Return the seed of one sample (rule 16); `own` is a seed that the program gave."""
        if own is not None:
            return node_seed(own, 0, "", sample, self.run.options.attempt)
        options = self.run.options
        return node_seed(options.seed, options.row, self.node.address, sample, options.attempt)

    def new_request(self, request_id: int, token_ids: list[int], limit: int) -> Request:
        """Return a request for the node; the caller queues it."""
        run, gang = self.run, self.place.gang
        return Request(
            request_id=request_id,
            program_id=run.run_id,
            node_id=self.node.id,
            token_ids=token_ids,
            limit=limit,
            arrival=run.run_id,
            depth=self.place.depth,
            priority=run.options.priority,
            gang=f"{run.run_id}:{gang}" if gang else "",
            starts_together=self.place.starts_together,
        )

    def result(
        self,
        now: float,
        *,
        text: str,
        completion_tokens: int = 0,
        tree_tokens: int = 0,
        samples: tuple[Sample, ...] = (),
        scores: tuple[ChoiceScore, ...] = (),
    ) -> NodeResult:
        """Return the node's result, with what was counted and timed on the way to it."""
        return NodeResult(
            text=text,
            samples=samples,
            scores=scores,
            grammar_engine="" if self.grammar is None else self.grammar.engine,
            usage=Usage(
                prompt_tokens=self.prompt_tokens,
                cached_tokens=self.cached_tokens,
                completion_tokens=completion_tokens,
                forced_tokens=self.forced_tokens,
                tree_tokens=tree_tokens,
            ),
            timings=Timings(
                ready=self.ready_s,
                scheduled=self.scheduled_s,
                first_token=self.first_token_s,
                finished=now,
            ),
        )


@dataclass(slots=True, eq=False)
class ProgramRun:
    """One run: a graph that grows, and where its events go.

    `ended` are the nodes whose terminal event was given, or that had ended in an earlier run.
    """

    run_id: int
    options: RunOptions
    sink: EventSink
    resolved: dict[int, NodeResult]
    failed: dict[int, UmbelError]
    state: GraphState = field(default_factory=GraphState)
    readers: GraphReaders = field(default_factory=GraphReaders)
    places: dict[int, Place] = field(default_factory=dict)
    tasks: dict[int, NodeTask] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    joined_gangs: set[str] = field(default_factory=set)  # of which some branches are known to meet
    is_closed: bool = False
    num_nodes: int = 0  # that its pieces have brought
    times: ProgramTimes = field(default_factory=ProgramTimes)
    over: UmbelError | None = None  # why nothing of it runs any more: its time limit, a defect

    def text_of(self, op: Text) -> str:
        """Return what a ready Text appends."""
        return "".join(
            self.state.results[part.node].text if isinstance(part, Ref) else part
            for part in op.parts
        )

    def add_gangs(self, nodes: Iterable[GraphNode]) -> None:
        """Note which forks of a piece a join of the piece waits for."""
        for node in nodes:
            if type(node.op) is Branch and node.op.meets:
                self.joined_gangs.add(node.op.gang)

    def starts_together(self, branch: Branch) -> bool:
        """Whether a branch is of no use without its siblings, as far as the graph is known.

        A fork that no join of its piece waits for may still meet in one of a later piece.
        """
        is_told = self.options.is_whole or branch.gang in self.joined_gangs
        return branch.meets or not is_told

    def place_after(self, node_id: int | None) -> Place:
        """Return where a finished node ends; None is the empty prompt."""
        return Place(TokenRow()) if node_id is None else self.places[node_id]

    def deliver(self) -> bool:
        """Hand pending events to the sink; return whether it took them."""
        events, self.events = self.events, []
        if not events:
            return True
        try:
            self.sink(events)
        except BaseException:  # the user's side: whatever it raises must not stop the engine
            logger.exception("the event sink of run %d failed; the run is cancelled", self.run_id)
            self.sink = _drop
            return False
        return True

    @property
    def is_idle(self) -> bool:
        """Whether every node that has come has ended."""
        return len(self.ended) == self.num_nodes


def _drop(_: Sequence[Event]) -> None:
    """Take the events of a run whose own sink failed."""
