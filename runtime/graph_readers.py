"""Which places of a run's graph will still be gone on from, by which node, and about when.

A place is where a node's text ends. It is read by the gens and selects that continue it, over
texts, roles and forks between, until they have ended, and, while the run may grow, by whoever may
continue a tail. Pure bookkeeping over one run's nodes; knows no tokens, no requests and no cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from umbel.lang.graph import GraphNode
from umbel.lang.ir import Branch, Gen, Join, Op, Select


@dataclass(slots=True)
class _Entry:
    """One node. Times are steps from the run's start, had each gen all its tokens to make."""

    parent: int | None
    computes: bool  # a gen or a select
    start: int
    end: int
    children: list[int] = field(default_factory=list)
    num_readers: int = 1  # children that read this place, or lead to who does; a tail counts one
    is_tail: bool = True
    reads: bool = True  # whether it counts for its parent


class Extension(NamedTuple):
    """What more of a graph changes for the places before it."""

    read: list[int]  # it is known now who reads them
    unread: list[int]  # nobody reads them any more


class GraphReaders:
    """The readers of one run's places; every call costs a constant time a node, amortised.

    `now` is how far the run has come, on the scale of the entries' times.
    """

    #: readers looked at to find the next one
    MOST_LOOKED_AT = 32

    def __init__(self) -> None:
        self.now = 0
        self._entries: list[_Entry] = []

    def add(self, nodes: Iterable[GraphNode]) -> Extension:
        """Take in more of the graph."""
        base = len(self._entries)
        read: dict[int, None] = {}
        unread: list[int] = []
        for node in nodes:
            edges = (*node.deps, *(() if node.parent is None else (node.parent,)))
            start = max((self._entries[edge].end for edge in edges), default=0)
            computes = isinstance(node.op, Gen | Select)
            self._entries.append(_Entry(node.parent, computes, start, start + _cost(node.op)))
            if node.parent is not None:
                self._entries[node.parent].children.append(node.id)
                self._read(node.parent)
                if not isinstance(node.op, Branch):  # a fork's parent may go on
                    self._end_tail(node.parent, unread)
            if isinstance(node.op, Join):  # a branch that was joined is not appended to
                for branch in node.op.branches:
                    self._end_tail(branch, unread)
            if computes:
                read.update(dict.fromkeys(self._places_before(node, base)))
        return Extension(list(read), unread)

    def ended(self, node_id: int, *, failed: bool = False) -> list[int]:
        """Note a node's end; return the places that nobody reads any more. Idempotent."""
        unread: list[int] = []
        entry = self._entries[node_id]
        if failed:
            self._end_tail(node_id, unread)
        else:
            self.now = max(self.now, entry.end)
        if entry.computes or failed:
            self._stop_reading(node_id, unread)
        return unread

    def close(self) -> list[int]:
        """Note that the graph grows no more; return the places that nobody reads any more."""
        unread: list[int] = []
        for node_id in range(len(self._entries)):
            self._end_tail(node_id, unread)
        return unread

    def place_read(self, node_id: int) -> int | None:
        """Return the last place on the path to a node, its own included, that will be read."""
        at: int | None = node_id
        while at is not None and not self._entries[at].num_readers:
            at = self._entries[at].parent
        return at

    def steps_left(self, place: int) -> int | None:
        """Return about how many steps are left until a place is read; None if nobody can say."""
        soonest: int | None = None
        todo, num_seen = [place], 0
        while todo and num_seen < self.MOST_LOOKED_AT:
            for child in self._entries[todo.pop()].children:
                entry = self._entries[child]
                if not entry.reads:
                    continue
                num_seen += 1
                if not entry.computes:
                    todo.append(child)
                elif soonest is None or entry.start < soonest:
                    soonest = entry.start
        return None if soonest is None else max(0, soonest - self.now)

    def _places_before(self, reader: GraphNode, base: int) -> list[int]:
        """Return the places before `base` that a reader continues, to the last one computed."""
        places: list[int] = []
        at = reader.parent
        while at is not None and len(places) < self.MOST_LOOKED_AT:
            if at < base:
                places.append(at)
            if self._entries[at].computes:
                break
            at = self._entries[at].parent
        return places

    def _read(self, place: int) -> None:
        """Count one more reader, which may make the place lead to one again."""
        at: int | None = place
        while at is not None:
            entry = self._entries[at]
            entry.num_readers += 1
            if entry.reads or entry.computes:
                return
            entry.reads = True
            at = entry.parent

    def _end_tail(self, node_id: int, unread: list[int]) -> None:
        entry = self._entries[node_id]
        if entry.is_tail:
            entry.is_tail = False
            self._lose_reader(node_id, unread)

    def _lose_reader(self, place: int, unread: list[int]) -> None:
        entry = self._entries[place]
        entry.num_readers -= 1
        if entry.num_readers == 0:
            unread.append(place)
            if not entry.computes:
                self._stop_reading(place, unread)

    def _stop_reading(self, node_id: int, unread: list[int]) -> None:
        """Count a node no more for its parent, nor what leads to nobody else then."""
        at: int | None = node_id
        while at is not None and self._entries[at].reads:
            entry = self._entries[at]
            entry.reads = False
            at = entry.parent
            if at is None:
                return
            above = self._entries[at]
            above.num_readers -= 1
            if above.num_readers:
                return
            unread.append(at)
            if above.computes:
                return


def _cost(op: Op) -> int:
    """Return the steps that a node takes at most, once it is started."""
    if isinstance(op, Gen):
        return op.sampling.max_tokens
    return 1 if isinstance(op, Select) else 0
