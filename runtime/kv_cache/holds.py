"""Which cached prefixes programs will read again, and whose are given up when nothing else can go.

A program holds the places of its graph that some node still continues: the paths to them are live,
and are never evicted while anything else can be. When only live prefixes are left, a program is
retracted: it lets go of all it holds, and what of that is evicted is computed again when the program
comes to it. Knows programs by number; nothing of graphs, requests or slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from umbel.lang.errors import EngineConfigError

from .radix_cache import RadixCache
from .radix_node import Mark, NodeClass
from .reclaim_order import LeastRecentlyUsed, NextUse, Owner, ReclaimOrder

EVICTION_POLICIES: dict[str, type[ReclaimOrder]] = {"lru": LeastRecentlyUsed, "next-use": NextUse}


@dataclass(slots=True, eq=False)
class Promise:
    """The constant prefix of a registered program; what of it is cached goes last."""

    token_ids: list[int]
    namespace: str
    mark: Mark | None = None


@dataclass(slots=True, eq=False)
class _Program(Owner):
    """One program that has requests, or holds something."""

    places: dict[int, list[Mark]] = field(default_factory=dict)

    @property
    def holds_anything(self) -> bool:
        return bool(self.places)


class Holds:
    """The marks of live programs and of promises in one cache.

    `now` counts steps and is set by the owner. Raises EngineConfigError if there is no eviction
    policy of that name.
    """

    def __init__(self, cache: RadixCache, policy: str = "next-use") -> None:
        if policy not in EVICTION_POLICIES:
            raise EngineConfigError(
                f"eviction policy {policy!r} was asked for; there are "
                f"{', '.join(sorted(EVICTION_POLICIES))}"
            )
        self._cache = cache
        self._order = EVICTION_POLICIES[policy]()
        self._programs: dict[int, _Program] = {}
        self._promises: dict[str, list[Promise]] = {}
        self.num_retracted = 0  # programs that had to let go, over the life

    # ---- places

    def hold(self, program_id: int, place: int, tokens: list[int], namespace: str = "") -> None:
        """Make live what is cached of a row that a program will continue at `place`.

        A place may be held more than once, for rows that differ or have grown.
        """
        node = self._cache.find(tokens, namespace)
        if node is None:
            return
        program = self._program(program_id)
        marks = program.places.get(place, [])
        if any(mark.node is node for mark in marks):
            return
        program.places[place] = [*marks, self._cache.mark(node, NodeClass.LIVE)]
        self._order.update(program)

    def drop(self, program_id: int, place: int) -> None:
        """Note that nobody will continue a place. Idempotent."""
        program = self._programs.get(program_id)
        if program is not None:
            for mark in program.places.pop(place, ()):
                self._cache.unmark(mark)
            self._forget_if_unused(program)

    def drop_program(self, program_id: int) -> None:
        """Note that a program reads nothing any more. Idempotent."""
        program = self._programs.get(program_id)
        if program is not None:
            self._let_go(program)
            self._forget_if_unused(program)

    def retract(self, program_id: int) -> None:
        """Let go of all a program holds, because others need the room more."""
        program = self._programs.get(program_id)
        if program is not None and program.places:
            self._let_go(program)
            self.num_retracted += 1
            self._forget_if_unused(program)

    def retract_one(self) -> bool:
        """Retract the program that the eviction policy names; return whether there was one."""
        program_id = self._order.first()
        if program_id is None:
            return False
        self.retract(program_id)
        return True

    # ---- where programs stand

    def set_now(self, now: int) -> None:
        """Note the step that it is."""
        self._order.now = now

    def queued(self, program_id: int, key: tuple[Any, ...]) -> None:
        """Note that a request of a program waits; `key` is its place in the queue's order."""
        program = self._program(program_id)
        program.key = min(program.key, key) if program.num_waiting else key
        program.num_waiting += 1
        self._order.update(program, touches=False)

    def left_queue(self, program_id: int) -> None:
        """Note that a waiting request of a program was ended."""
        program = self._programs[program_id]
        program.num_waiting -= 1
        self._order.update(program, touches=False)
        self._forget_if_unused(program)

    def started(self, program_id: int) -> None:
        """Note that a waiting request of a program runs."""
        program = self._programs[program_id]
        program.num_waiting -= 1
        program.num_running += 1
        self._order.update(program)

    def stopped(self, program_id: int) -> None:
        """Note that a running request of a program runs no longer."""
        program = self._programs[program_id]
        program.num_running -= 1
        self._order.update(program)
        self._forget_if_unused(program)

    # ---- promises

    def promise(self, token_ids: list[int], namespace: str = "") -> Promise:
        """Keep a constant prefix as long as anything that nobody reads can go instead.

        What is cached of it now is kept, and what is computed of it later, until `unpromise`.
        """
        promise = Promise(token_ids, namespace)
        self._promises.setdefault(namespace, []).append(promise)
        self._attach(promise)
        return promise

    def unpromise(self, promise: Promise) -> None:
        """Take a promise back. Idempotent."""
        promises = self._promises.get(promise.namespace, [])
        if promise in promises:
            promises.remove(promise)
            if not promises:
                del self._promises[promise.namespace]
        if promise.mark is not None:
            self._cache.unmark(promise.mark)
            promise.mark = None

    def computed(self, tokens: list[int], namespace: str) -> None:
        """Note that a row was computed: promises that it begins with are kept from now on."""
        for promise in self._promises.get(namespace, ()):
            size = len(promise.token_ids)
            if tokens[:size] == promise.token_ids:
                self._attach(promise)

    # ---- invariants

    def check(self) -> None:
        """Assert that every mark in the cache is one of these, and that the queues know it."""
        marks = [m for p in self._programs.values() for held in p.places.values() for m in held]
        marks += [p.mark for ps in self._promises.values() for p in ps if p.mark is not None]
        found = [mark for node in self._cache.nodes() for mark in node.marks]
        assert {id(m) for m in found} == {id(m) for m in marks if m.node is not None}
        for program in self._programs.values():
            assert program.num_waiting >= 0 <= program.num_running, "requests counted wrongly"
            assert program.num_waiting or program.num_running or program.places, "a program is left"
        self._order.check([p for p in self._programs.values() if p.holds_anything])

    # ---- parts

    def _attach(self, promise: Promise) -> None:
        node = self._cache.find(promise.token_ids, promise.namespace)
        old = promise.mark
        if node is None or (old is not None and old.node is node):
            return
        promise.mark = self._cache.mark(node, NodeClass.PROMISED)
        if old is not None:
            self._cache.unmark(old)

    def _let_go(self, program: _Program) -> None:
        for marks in program.places.values():
            for mark in marks:
                self._cache.unmark(mark)
        program.places.clear()

    def _program(self, program_id: int) -> _Program:
        program = self._programs.get(program_id)
        if program is None:
            program = self._programs[program_id] = _Program(program_id, self._order.now)
        return program

    def _forget_if_unused(self, program: _Program) -> None:
        if program.places:
            return
        self._order.discard(program)
        if not (program.num_waiting or program.num_running):
            del self._programs[program.program_id]
