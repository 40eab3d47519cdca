"""Which cached prefixes programs will read again, and which go when nothing else can.

A program holds the places of its graph that some node still continues: the paths to them are live,
and are never evicted while anything else can be. When only live prefixes are left, programs are
retracted from places one by one, in the order of the eviction policy: what is evicted of such a
place is computed again when its program comes to it. So a program that waits for a slow tool keeps
what it has as long as there is room, and is in nobody's way when there is none.

Most places are held for a moment: a program's last one, until it is known that the program is over.
So a hold marks its path when the next step begins, before anything can be evicted.

Knows programs and places by number; nothing of graphs, requests or slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from umbel.lang.errors import EngineConfigError

from .radix_cache import RadixCache
from .radix_node import Mark, NodeClass
from .reclaim_order import EVICTION_POLICIES, Hold


@dataclass(slots=True, eq=False)
class Promise:
    """The constant prefix of a registered program; what of it is cached goes last."""

    token_ids: list[int]
    namespace: str
    mark: Mark | None = None

    @property
    def num_cached(self) -> int:
        """How many of its tokens are in the cache, and kept."""
        if self.mark is None or self.mark.node is None:
            return 0
        return self.mark.node.depth()


class Holds:
    """The marks of live programs and of promises in one cache.

    Raises EngineConfigError if there is no eviction policy of that name.
    """

    def __init__(self, cache: RadixCache, policy: str = "next-use") -> None:
        if policy not in EVICTION_POLICIES:
            raise EngineConfigError(
                f"eviction policy {policy!r} was asked for; there are "
                f"{', '.join(sorted(EVICTION_POLICIES))}"
            )
        self._cache = cache
        self._order = EVICTION_POLICIES[policy]()
        self._programs: dict[int, dict[int, Hold]] = {}  # by place; with an entry it has a hold
        self._unmarked: list[tuple[Hold, list[int], str]] = []  # a row of a hold, since this step
        self._gaps: dict[int, int] = {}  # steps between turns, of programs, until they end
        # by program and place: the step since which nobody is known to read it, held or given up
        self._away: dict[int, dict[int, int]] = {}
        self._promises: dict[str, list[Promise]] = {}
        self.num_given_up = 0  # holds that had to go, over the life

    def begin_step(self, now: int) -> None:
        """Note which step it is, counted by the owner; what is held from here on is live."""
        self._order.now = now
        if self._unmarked:
            self._mark_held()

    # ---- places

    def hold(
        self,
        program_id: int,
        place: int,
        tokens: list[int],
        steps: int | None = None,
        namespace: str = "",
    ) -> None:
        """Make live what is cached of a row that a program will go on from, at one place.

        `steps` are taken to be left until it does; None if its graph does not say. A place may be
        held for many rows. The row must not change until the next step begins.
        """
        if steps is None:
            self._away.setdefault(program_id, {})[place] = self._order.now
        if not self._cache.num_nodes:
            return
        places = self._programs.setdefault(program_id, {})
        hold = places.get(place)
        if hold is None:
            hold = places[place] = Hold(program_id, place, gap=self._gaps.get(program_id))
        self._unmarked.append((hold, tokens, namespace))
        self._expect(hold, steps)

    def expect(self, program_id: int, place: int, steps: int) -> None:
        """Note that it is known by now when a place is read."""
        now = self._order.now
        since = self._away.get(program_id, {}).pop(place, now)
        if now > since:
            self._order.came_back(now - since)
            self._gaps[program_id] = now - since
        hold = self._programs.get(program_id, {}).get(place)
        if hold is not None:
            self._expect(hold, steps)

    def drop(self, program_id: int, place: int) -> None:
        """Note that nobody will go on from a place. Idempotent."""
        self._away.get(program_id, {}).pop(place, None)
        hold = self._programs.get(program_id, {}).get(place)
        if hold is not None:
            self._let_go(hold)

    def retract(self, program_id: int) -> None:
        """Let go of all that a program holds, because others need the room more."""
        for hold in list(self._programs.get(program_id, {}).values()):
            self._let_go(hold)
            self.num_given_up += 1

    def drop_program(self, program_id: int) -> None:
        """Note that a program is over. Idempotent."""
        for hold in list(self._programs.get(program_id, {}).values()):
            self._let_go(hold)
        self._gaps.pop(program_id, None)
        self._away.pop(program_id, None)

    def give_up_one(self) -> bool:
        """Let the hold go that the eviction policy names; return whether there was one."""
        hold = self._order.first()
        if hold is None:
            return False
        self._let_go(hold)
        self.num_given_up += 1
        return True

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
            if promise.num_cached < size and tokens[:size] == promise.token_ids:
                self._attach(promise)

    # ---- invariants

    def check(self) -> None:
        """Assert that every mark in the cache is one of these, and that every hold is queued."""
        holds = [hold for places in self._programs.values() for hold in places.values()]
        unmarked = {id(hold) for hold, _, _ in self._unmarked}
        assert all(hold.marks or id(hold) in unmarked for hold in holds), "a hold of nothing"
        marks = [mark for hold in holds for mark in hold.marks]
        marks += [p.mark for ps in self._promises.values() for p in ps if p.mark is not None]
        found = [mark for node in self._cache.nodes() for mark in node.marks]
        assert {id(m) for m in found} == {id(m) for m in marks if m.node is not None}
        assert all(self._programs.values()), "a program that holds nothing is kept"
        self._order.check(holds)

    # ---- parts

    def _expect(self, hold: Hold, steps: int | None) -> None:
        hold.since = self._order.now
        hold.expected = None if steps is None else hold.since + steps
        self._order.update(hold)

    def _mark_held(self) -> None:
        """Mark the paths of what was held since the last step; holds of nothing are let go."""
        unmarked, self._unmarked = self._unmarked, []
        for hold, tokens, namespace in unmarked:
            node = self._cache.find(tokens, namespace) if hold.is_held else None
            if node is not None and all(mark.node is not node for mark in hold.marks):
                hold.marks.append(self._cache.mark(node, NodeClass.LIVE))
        for hold, _, _ in unmarked:
            if hold.is_held and not hold.marks:
                self._let_go(hold)

    def _let_go(self, hold: Hold) -> None:
        for mark in hold.marks:
            self._cache.unmark(mark)
        self._order.discard(hold)
        places = self._programs[hold.program_id]
        del places[hold.place]
        if not places:
            del self._programs[hold.program_id]

    def _attach(self, promise: Promise) -> None:
        node = self._cache.find(promise.token_ids, promise.namespace)
        old = promise.mark
        if node is None or (old is not None and old.node is node):
            return
        promise.mark = self._cache.mark(node, NodeClass.PROMISED)
        if old is not None:
            self._cache.unmark(old)
