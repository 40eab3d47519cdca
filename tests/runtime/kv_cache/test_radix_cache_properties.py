"""The radix cache against a model that is a plain dict of prefixes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from umbel.runtime.kv_cache import RadixCache, RadixNode

Prefix = tuple[int, ...]
Place = tuple[str, Prefix]

NAMESPACES = st.sampled_from(["", "adapter"])
TOKENS = st.lists(st.integers(0, 2), max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """Each cached prefix (with its namespace) has a slot; locks and steps name prefixes too."""

    locks = Bundle("locks")

    @initialize()
    def start(self) -> None:
        self.cache = RadixCache()
        self.slot: dict[Place, int] = {}
        self.time: dict[Place, int] = {}
        self.uncomputed: set[Place] = set()
        self.locked: list[Place] = []
        self.next_slot = 0
        self.now = 0

    # ---- the model

    def longest(self, tokens: list[int], namespace: str, limit: int) -> int:
        length = 0
        while length < limit and (namespace, tuple(tokens[: length + 1])) in self.slot:
            length += 1
        return length

    def is_locked(self, place: Place) -> bool:
        namespace, prefix = place
        return any(n == namespace and p[: len(prefix)] == prefix for n, p in self.locked)

    def is_removable(self, place: Place) -> bool:
        namespace, prefix = place
        return not self.is_locked(place) and not any(
            n == namespace and p[: len(prefix)] == prefix for n, p in self.uncomputed
        )

    def touch(self, place: Place) -> None:
        self.now += 1
        namespace, prefix = place
        for length in range(len(prefix) + 1):
            self.time[namespace, prefix[:length]] = self.now

    def remove(self, slots: list[int]) -> list[Place]:
        places = {slot: place for place, slot in self.slot.items()}
        removed = [places[slot] for slot in slots]
        assert len(set(removed)) == len(removed)
        for place in removed:
            del self.slot[place]
            del self.time[place]
            self.uncomputed.discard(place)
        return removed

    # ---- what is done to both

    @rule(tokens=TOKENS, namespace=NAMESPACES, limit=st.integers(0, 16))
    def match(self, tokens: list[int], namespace: str, limit: int) -> None:
        limit = min(limit, len(tokens))
        expected = self.longest(tokens, namespace, limit)
        assert self.cache.probe(tokens, namespace, limit).num_tokens == expected
        num, node, slots = self.cache.match_prefix(tokens, namespace, limit)
        assert num == expected
        assert slots == [self.slot[namespace, tuple(tokens[: i + 1])] for i in range(num)]
        assert [t for n in node.path() for t in n.key] == tokens[:num]
        assert self.cache.probe(tokens, namespace, limit).num_tokens == expected

    @rule(
        tokens=TOKENS,
        namespace=NAMESPACES,
        limit=st.integers(0, 16),
        computed=st.booleans(),
    )
    def insert(self, tokens: list[int], namespace: str, limit: int, computed: bool) -> None:
        """Insert the rest of a row below a match that may be cut short."""
        start, node, _ = self.cache.match_prefix(tokens, namespace, limit)
        slots = list(range(self.next_slot, self.next_slot + len(tokens) - start))
        self.next_slot += len(slots)
        present, end = self.cache.insert(node, tokens[start:], slots, computed=computed)
        assert start + present == self.longest(tokens, namespace, len(tokens))
        assert [t for n in end.path() for t in n.key] == tokens
        time = self.time.get((namespace, tuple(tokens[: start + present])), 0)
        for row in range(start + present, len(tokens)):
            place = (namespace, tuple(tokens[: row + 1]))
            self.slot[place] = slots[row - start]
            self.time[place] = time
            if not computed:
                self.uncomputed.add(place)

    @rule(target=locks, tokens=TOKENS, namespace=NAMESPACES)
    def lock(self, tokens: list[int], namespace: str) -> tuple[Place, RadixNode]:
        num, node, _ = self.cache.match_prefix(tokens, namespace)
        self.cache.lock(node)
        place = (namespace, tuple(tokens[:num]))
        self.locked.append(place)
        self.touch(place)
        return place, node

    @rule(target=locks, held=consumes(locks), tokens=TOKENS)
    def move_lock_down(
        self, held: tuple[Place, RadixNode], tokens: list[int]
    ) -> tuple[Place, RadixNode]:
        (namespace, prefix), node = held
        row = [*prefix, *tokens]
        num, lower, slots = self.cache.extend_match(node, row, len(prefix), len(row))
        assert slots == [self.slot[namespace, tuple(row[: i + 1])] for i in range(len(prefix), num)]
        self.cache.lock(lower, until=node)
        self.locked.remove((namespace, prefix))
        place = (namespace, tuple(row[:num]))
        self.locked.append(place)
        self.now += 1
        for length in range(len(prefix) + 1, num + 1):
            self.time[namespace, tuple(row[:length])] = self.now
        return place, lower

    @rule(held=consumes(locks))
    def unlock(self, held: tuple[Place, RadixNode]) -> None:
        place, node = held
        assert [t for n in node.path() for t in n.key] == list(place[1])  # splits keep the end
        self.cache.unlock(node)
        self.locked.remove(place)
        self.touch(place)

    @rule(num=st.integers(0, 12))
    def evict(self, num: int) -> None:
        removable = [place for place in self.slot if self.is_removable(place)]
        times = dict(self.time)
        slots = self.cache.evict(num)
        assert len(slots) == min(num, len(removable))
        removed = self.remove(slots)
        assert set(removed) <= set(removable)
        inner = {(n, p[:i]) for n, p in self.slot for i in range(len(p))}
        leaves = [p for p in self.slot if p not in inner and self.is_removable(p)]
        youngest = max((times[place] for place in removed), default=0)
        assert all(times[place] >= youngest for place in leaves), "not the least recently used"

    @rule()
    def step_completes(self) -> None:
        self.cache.mark_computed()
        self.uncomputed.clear()

    @precondition(lambda self: not any(map(self.is_locked, self.uncomputed)))
    @rule()
    def step_fails(self) -> None:
        lost = {
            (namespace, prefix)
            for namespace, prefix in self.slot
            if any((namespace, prefix[: i + 1]) in self.uncomputed for i in range(len(prefix)))
        }
        assert set(self.remove(self.cache.drop_uncomputed())) == lost

    # ---- what always holds

    @invariant()
    def cache_equals_model(self) -> None:
        self.cache.check()
        for namespace in ("", "adapter"):  # an unused namespace is forgotten, and its age with it
            if not any(n == namespace for n, _ in [*self.slot, *self.locked]):
                self.time.pop((namespace, ()), None)
        assert self.cache.total == len(self.slot)
        assert self.cache.num_protected == sum(map(self.is_locked, self.slot))
        assert {s for n in self.cache.nodes() for s in n.slots} == set(self.slot.values())


TestRadixCache = CacheMachine.TestCase
TestRadixCache.settings = settings(stateful_step_count=40)
