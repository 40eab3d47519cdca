"""What a graph will cost before it runs, and what it did cost after; runs and draws nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbel.lang.choice_scoring import beginning_choice
from umbel.lang.errors import ProgramError, WireError, causes_of, to_wire
from umbel.lang.graph import GraphNode, RequestGraph
from umbel.lang.ir import Branch, Gen, Join, Pick, Ref, Select, Text
from umbel.lang.plan import NOTHING, Actual, Bounds, ConstraintSize, NodePlan, Plan, needs_model
from umbel.lang.results import NodeResult
from umbel.lang.run_result import Result

from .backends.base import TokenCounter
from .constraint_size import constraint_size

Outcome = NodeResult | WireError


@dataclass(frozen=True, slots=True)
class DrawablePlan(Plan):
    """A plan that draws itself."""

    def draw(self, path: str | Path, *, title: str = "") -> Path:
        """Write the plan's picture and return its path; see `umbel.lang.plan.Plan`."""
        from .picture import to_html, to_mermaid

        target = Path(path)
        if target.suffix == ".html":
            drawn = to_html(self, title=title or target.stem)
        elif target.suffix == ".mmd":
            drawn = to_mermaid(self)
        else:
            raise ValueError(f"draw({str(path)!r}): a picture's name ends in .html or .mmd")
        target.write_text(drawn, encoding="utf-8", newline="\n")
        return target


def make_plan(
    graph: RequestGraph,
    *,
    count_tokens: TokenCounter | None = None,
    results: Mapping[int, Outcome] | None = None,
    num_retries: int = 0,
) -> Plan:
    """Return what a whole graph will cost; with `results`, also what it did cost.

    `count_tokens` counts the tokens of literal text, piece by piece; without it a token is taken
    to be four characters, and the plan says that it is an estimate. `results` are by node id;
    nodes that have not ended are left out. The bounds are those of a run in which nothing fails.

    Raises ProgramError when the graph is only a later piece of a run, or not well formed.
    """
    if graph.base != 0:
        raise ProgramError(
            f"the graph starts at node {graph.base}: a plan needs all pieces of a run as one graph"
        )
    graph.check()
    nodes = graph.nodes
    appended, decode, sizes = _tokens(nodes, count_tokens or _quarter)
    num_paths = _count_paths(nodes)
    optional = _optional(nodes)
    decode = [Bounds(0, b.high) if i in optional else b for i, b in enumerate(decode)]
    actuals = _actuals(results or {})
    steps = [_steps(node, decode[node.id]) for node in nodes]
    prompts: list[Bounds] = []
    plans: list[NodePlan] = []
    for node in nodes:
        i, paths = node.id, num_paths[node.id]
        parent = node.parent
        prompts.append(NOTHING if parent is None else prompts[parent] + appended[parent])
        if isinstance(node.op, Select) and needs_model(node):
            prefill = _choice_tokens(node.op, count_tokens or _quarter)
        else:
            prefill = appended[i] if paths and not isinstance(node.op, Gen | Pick) else NOTHING
        if i in optional:
            prefill = Bounds(0, prefill.high)
        plans.append(
            NodePlan(
                node,
                prompts[i],
                appended[i],
                prefill,
                decode[i],
                paths,
                appended[i] * max(paths - 1, 0),
                sizes.get(i),
                actuals.get(i),
            )
        )
    seconds = [actuals[i].seconds if i in actuals else 0.0 for i in range(len(nodes))]
    chain = _longest(nodes, seconds if any(seconds) else [float(bound.high) for bound in steps])
    return DrawablePlan(
        graph,
        tuple(plans),
        is_estimate=count_tokens is None,
        critical_path=chain,
        critical_steps=sum((steps[i] for i in chain), NOTHING),
        num_retries=num_retries,
    )


def plan_result(result: Result[Any], *, count_tokens: TokenCounter | None = None) -> Plan:
    """Return the plan of a run that has ended, with what it did cost.

    Raises the run's error when the run failed before it had a state.
    """
    if result.state is None:
        assert result.error is not None, "a result has a state or an error"
        raise result.error
    run = result.state._run
    outcomes: dict[int, Outcome] = {}
    for node in run.nodes:
        error = run.failure(node.id)
        # of a failure, the picture shows the cause: where it happened, it shows anyway
        outcomes[node.id] = run.result(node.id) if error is None else to_wire(_cause(error))
    return make_plan(
        RequestGraph(tuple(run.nodes)),
        count_tokens=count_tokens,
        results=outcomes,
        num_retries=result.attempt,
    )


def _cause(error: BaseException) -> BaseException:
    return list(causes_of(error))[-1]


def _quarter(text: str) -> int:
    return -(-len(text) // 4)


def _tokens(
    nodes: Sequence[GraphNode], count: TokenCounter
) -> tuple[list[Bounds], list[Bounds], dict[int, ConstraintSize]]:
    """Return for each node what it appends and what it samples, and the constraints' sizes."""
    appended: list[Bounds] = []
    decode: list[Bounds] = []
    sizes: dict[int, ConstraintSize] = {}
    for node in nodes:
        op, adds, samples = node.op, NOTHING, NOTHING
        match op:
            case Text(parts=parts):
                for part in parts:
                    if isinstance(part, Ref):
                        adds += appended[part.node]
                    else:
                        adds += Bounds(1, 1) * count(part)
            case Gen(constraint=constraint, n=n):
                if constraint is not None:
                    sizes[node.id] = constraint_size(constraint)
                one = _gen_tokens(op, sizes.get(node.id)) + _thinking_tokens(op)
                samples = one * n
                adds = Bounds(0, one.high) if n == 1 else NOTHING
            case Select(choices=choices):
                counts = [count(choice) for choice in choices]
                adds = Bounds(min(counts), max(counts))
            case Pick() if node.parent is not None:
                picked = nodes[node.parent].op
                if isinstance(picked, Gen):
                    adds = Bounds(0, decode[node.parent].high // picked.n)
            case Join(mode="append", branches=branches, policy=policy):
                adds = sum((_written(nodes, appended, last) for last in branches), NOTHING)
                if policy != "all":  # a failed branch adds nothing
                    adds = Bounds(0, adds.high)
            case _:
                pass
        appended.append(adds)
        decode.append(samples)
    return appended, decode, sizes


def _gen_tokens(op: Gen, size: ConstraintSize | None) -> Bounds:
    """Return how many tokens one sample takes. Where nothing else ends a gen, max_tokens does."""
    sampling = op.sampling
    most = sampling.max_tokens
    if size is None:
        if sampling.ignore_eos and not (
            sampling.stop or sampling.stop_token_ids or sampling.stop_regex
        ):
            return Bounds(most, most)
        return Bounds(max(sampling.min_tokens, 1), most)
    if size.max_bytes is not None:  # what is healed is sampled besides, and counts for nothing
        # a token covers a byte at least, and the end may be a token of its own
        most = min(most, size.max_bytes + 1)
    least = 0 if size.max_bytes == 0 else 1
    return Bounds(min(max(sampling.min_tokens, least), most), most)


def _thinking_tokens(op: Gen) -> Bounds:
    """Return the size of the block before a value, whose end is a token at least."""
    return Bounds(1, op.max_thinking_tokens) if op.thinking else NOTHING


def _choice_tokens(op: Select, count: TokenCounter) -> Bounds:
    """Return the size of a select's token tree: shared beginnings are in it once."""
    counts = [count(choice) for choice in op.choices]
    ends = len(counts)  # a terminator after each choice, where one is scored
    has_ends = op.terminator is not None or beginning_choice(op.choices) is not None
    tree = Bounds(max(counts), sum(counts) + (ends if has_ends else 0))
    # that method scores every choice a second time, without the text before it
    return tree * 2 if op.method == "unconditional_likelihood_normalized" else tree


def _written(nodes: Sequence[GraphNode], appended: Sequence[Bounds], last: int) -> Bounds:
    """Return the tokens of what a branch wrote, from its Branch node to `last`."""
    total, at = NOTHING, last
    while not isinstance(nodes[at].op, Branch):
        total += appended[at]
        parent = nodes[at].parent
        if parent is None:
            break
        at = parent
    return total


def _optional(nodes: Sequence[GraphNode]) -> set[int]:
    """Return the nodes that a join may cancel, since it does not wait for all its branches."""
    found: set[int] = set()
    for node in nodes:
        op = node.op
        if isinstance(op, Join) and op.policy == "any" and op.k < len(op.branches):
            for last in op.branches:
                at: int | None = last
                while at is not None and not isinstance(nodes[at].op, Branch):
                    at = nodes[at].parent
                found.add(last if at is None else at)
    for node in nodes:
        if node.parent in found:
            found.add(node.id)
    return found


def _count_paths(nodes: Sequence[GraphNode]) -> list[int]:
    """Return how many sequences that end in a gen or select run through each node."""
    children = [0] * len(nodes)  # paths that come in from the nodes that follow
    picks = [0] * len(nodes)
    paths = [0] * len(nodes)
    for node in reversed(nodes):
        i, op = node.id, node.op
        if isinstance(op, Gen):
            # each sample is a path; one that was picked goes on
            own = max(op.n - picks[i], 0) if op.n > 1 else int(children[i] == 0)
        else:
            own = int(needs_model(node) and children[i] == 0)
        paths[i] = children[i] + own
        if isinstance(op, Pick):
            paths[i] = max(paths[i], 1)
        if node.parent is not None:
            children[node.parent] += paths[i]
            picks[node.parent] += isinstance(op, Pick)
    return paths


def _steps(node: GraphNode, decode: Bounds) -> Bounds:
    """Return how many forward passes a node takes one after the other (its samples: together)."""
    if isinstance(node.op, Gen):
        return Bounds(decode.low // node.op.n, decode.high // node.op.n)
    return Bounds(1, 1) if needs_model(node) else NOTHING


def _longest(nodes: Sequence[GraphNode], weights: Sequence[float]) -> tuple[int, ...]:
    """Return the heaviest chain of edges from its first node on; of equals, the last to end."""
    total: list[float] = []
    before: list[int | None] = []
    for node in nodes:
        edges = sorted({*node.deps, *(() if node.parent is None else (node.parent,))})
        best = max(edges, key=lambda edge: total[edge], default=None)
        before.append(best)
        total.append(weights[node.id] + (0.0 if best is None else total[best]))
    if not total:
        return ()
    chain: list[int] = []
    at: int | None = max(range(len(total)), key=lambda i: (total[i], i))
    while at is not None:
        chain.append(at)
        at = before[at]
    return tuple(reversed(chain))


def _actuals(results: Mapping[int, Outcome]) -> dict[int, Actual]:
    timings = [r.timings for r in results.values() if isinstance(r, NodeResult) and r.timings.ready]
    origin = min((timing.ready for timing in timings), default=0.0)
    return {i: _actual(outcome, origin) for i, outcome in results.items()}


def _actual(outcome: Outcome, origin: float) -> Actual:
    if isinstance(outcome, WireError):
        return Actual("failed", error=f"{outcome.type}: {outcome.message}")
    timings = outcome.timings
    is_timed = timings.ready > 0 and timings.finished >= timings.ready
    return Actual(
        "finished",
        text=outcome.text or "\n".join(sample.text for sample in outcome.samples),
        usage=outcome.usage,
        start=timings.ready - origin if is_timed else 0.0,
        queued=max(timings.scheduled - timings.ready, 0.0) if is_timed else 0.0,
        seconds=timings.finished - timings.ready if is_timed else 0.0,
    )
