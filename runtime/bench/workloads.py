"""Fixed offline workloads as request graphs: random ids, lengths known beforehand.

A workload says what is asked for and how large the engine's pool is; not how it is submitted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from umbel.lang.graph import RequestGraph

from .graph_builder import GraphBuilder
from .random_text import RandomText

Size = Literal["full", "small"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's limits that a workload is made for."""

    max_running: int
    max_step_tokens: int


#: of each size, where the command line gives no others
LIMITS: dict[Size, Limits] = {"full": Limits(64, 2048), "small": Limits(8, 128)}


@dataclass(frozen=True, slots=True)
class Workload:
    """Programs that come at once. `pool_tokens` bounds the KV pool where the size matters."""

    name: str
    about: str
    graphs: tuple[RequestGraph, ...]
    max_tokens: int  # of the longest row
    pool_tokens: int | None = None


class _Maker(NamedTuple):
    about: str
    make: Callable[[RandomText, Size, Limits], _Programs]


class _Programs(NamedTuple):
    graphs: list[RequestGraph]
    max_tokens: int
    pool_tokens: int | None = None


def make_workload(name: str, text: RandomText, size: Size, limits: Limits) -> Workload:
    """Return a workload by name (a key of `WORKLOADS`)."""
    maker = WORKLOADS[name]
    programs = maker.make(text, size, limits)
    return Workload(
        name, maker.about, tuple(programs.graphs), programs.max_tokens, programs.pool_tokens
    )


def _tree_of_thought(text: RandomText, size: Size, _: Limits) -> _Programs:
    """Fork in two, four times over: 2 + 4 + 8 + 16 gens."""
    count, prompt, own, new = {"full": (8, 512, 32, 64), "small": (2, 40, 4, 6)}[size]

    def grow(builder: GraphBuilder, parent: int, depth: int) -> int:
        ends = []
        for index in range(2):
            branch = builder.branch(index, 2, parent)
            end = builder.gen(new, builder.text(text.draw(own), branch))
            ends.append(grow(builder, end, depth - 1) if depth > 1 else end)
        return builder.after(tuple(ends), parent)

    graphs = []
    for _program in range(count):
        builder = GraphBuilder()
        grow(builder, builder.text(text.draw(prompt), None), 4)
        graphs.append(builder.graph())
    return _Programs(graphs, prompt + 4 * (own + new))


def _judge(text: RandomText, size: Size, _: Limits) -> _Programs:
    """Judge an article from six sides at once, then sum up.

    Text of the judgments' length stands for them in the last prompt: a real quotation's number of
    tokens would depend on what was generated.
    """
    sizes = {"full": (16, 1024, 48, 64, 128), "small": (3, 60, 6, 5, 8)}
    count, prompt, own, new, last = sizes[size]
    graphs = []
    for _program in range(count):
        builder = GraphBuilder()
        article = builder.text(text.draw(prompt), None)
        ends = []
        for index in range(6):
            branch = builder.branch(index, 6, article)
            ends.append(builder.gen(new, builder.text(text.draw(own), branch)))
        join = builder.after(tuple(ends), article)
        builder.gen(last, builder.text(text.draw(6 * new), join))
        graphs.append(builder.graph())
    return _Programs(graphs, prompt + 6 * new + own + last)


def _select(text: RandomText, size: Size, _: Limits) -> _Programs:
    count, prompt, choice = {"full": (32, 1900, 25), "small": (4, 50, 5)}[size]
    graphs = []
    for _program in range(count):
        builder = GraphBuilder()
        prefix = builder.text(text.draw(prompt), None)
        builder.select(tuple(text.draw(choice) for _ in range(4)), prefix)
        graphs.append(builder.graph())
    return _Programs(graphs, prompt + 4 * choice)


#: five fields of fixed widths, so that every answer has the same length in characters
FIVE_FIELDS = (
    r'\{"name": "[a-z]{8}", "age": [1-9][0-9], "city": "[a-z]{8}", '
    r'"email": "[a-z]{6}@[a-z]{6}\.com", "member": (true|null)\}'
)


def _five_field_json(text: RandomText, size: Size, _: Limits) -> _Programs:
    count, shared, own = {"full": (64, 256, 256), "small": (4, 20, 20)}[size]
    task = text.draw(shared)
    graphs = []
    for _program in range(count):
        builder = GraphBuilder()
        builder.gen_regex(FIVE_FIELDS, 160, builder.text(task + text.draw(own), None))
        graphs.append(builder.graph())
    return _Programs(graphs, shared + own + 160)


def _turns(text: RandomText, count: int, turns: int, prompt: int, new: int) -> _Programs:
    graphs = []
    for _program in range(count):
        builder = GraphBuilder()
        at: int | None = None
        for _turn in range(turns):
            at = builder.gen(new, builder.text(text.draw(prompt), at))
        graphs.append(builder.graph())
    return _Programs(graphs, turns * (prompt + new))


def _multi_turn_short(text: RandomText, size: Size, _: Limits) -> _Programs:
    return _turns(text, *{"full": (32, 4, 256, 8), "small": (4, 3, 20, 3)}[size])


def _multi_turn_long(text: RandomText, size: Size, _: Limits) -> _Programs:
    return _turns(text, *{"full": (16, 4, 256, 256), "small": (3, 3, 20, 30)}[size])


#: share of the agents' rows at the end that the pool holds
AGENTS_POOL_SHARE = 0.3


def _agents(text: RandomText, size: Size, _: Limits) -> _Programs:
    """Agents that speak in turn, a few at a time, each on a long context of its own that grows.

    One program holds them all, so who reads which context next is known: an agent's turn waits
    for the agents before it, and is read again one round later.
    """
    sizes = {"full": (40, 2, 16, 512, 32, 32), "small": (12, 1, 8, 48, 6, 4)}
    count, at_once, rounds, prompt, own, new = sizes[size]
    builder = GraphBuilder()
    tips = [
        builder.text(text.draw(prompt), builder.branch(agent, count, None))
        for agent in range(count)
    ]
    before: tuple[int, ...] = ()
    for _round in range(rounds):
        for first in range(0, count, at_once):
            speakers = range(first, min(first + at_once, count))
            for agent in speakers:
                at = builder.after(before, tips[agent]) if before else tips[agent]
                tips[agent] = builder.gen(new, builder.text(text.draw(own), at))
            before = tuple(tips[agent] for agent in speakers)
    longest = prompt + rounds * (own + new)
    return _Programs([builder.graph()], longest, int(AGENTS_POOL_SHARE * count * longest))


def _in_batch_prefix(text: RandomText, size: Size, _: Limits) -> _Programs:
    sizes = {"full": (10, 32, 1024, 128, 16), "small": (3, 6, 64, 8, 4)}
    groups, each, shared, own, new = sizes[size]
    graphs = []
    for _group in range(groups):
        prefix = text.draw(shared)
        for _program in range(each):
            builder = GraphBuilder()
            builder.gen(new, builder.text(prefix + text.draw(own), None))
            graphs.append(builder.graph())
    return _Programs(graphs, shared + own + new)


def _no_reuse(text: RandomText, size: Size, _: Limits) -> _Programs:
    count, prompt, new = {"full": (128, 256, 64), "small": (12, 20, 6)}[size]
    return _turns(text, count, 1, prompt, new)


def _wide(text: RandomText, size: Size, limits: Limits) -> _Programs:
    """Sixteen equal programs of as many branches as may run at once, each a chain of gens."""
    count, turns, prompt, own, new = {"full": (16, 8, 64, 8, 6), "small": (16, 8, 10, 2, 3)}[size]
    width = limits.max_running
    graphs = []
    for _program in range(count):
        builder = GraphBuilder()
        trunk = builder.text(text.draw(prompt), None)
        ends = []
        for index in range(width):
            at = builder.branch(index, width, trunk)
            for _turn in range(turns):
                at = builder.gen(new, builder.text(text.draw(own), at))
            ends.append(at)
        builder.after(tuple(ends), trunk)
        graphs.append(builder.graph())
    return _Programs(graphs, prompt + turns * (own + new))


WORKLOADS: dict[str, _Maker] = {
    "tree-of-thought": _Maker("30 gens, 15 forks", _tree_of_thought),
    "judge": _Maker("six branches, then a verdict", _judge),
    "select": _Maker("one of four choices after a long prefix", _select),
    "json": _Maker("five fields by a regular expression", _five_field_json),
    "multi-turn-short": _Maker("four turns, short answers", _multi_turn_short),
    "multi-turn-long": _Maker("four turns, long answers", _multi_turn_long),
    "agents": _Maker("agents in turn, the pool 30% of their rows", _agents),
    "in-batch-prefix": _Maker("ten prefixes, 32 requests each", _in_batch_prefix),
    "no-reuse": _Maker("nothing in common", _no_reuse),
    "wide": _Maker("16 programs as wide as the running limit", _wide),
}
