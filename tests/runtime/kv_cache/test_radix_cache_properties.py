"""The radix cache against a model that is a plain dict of prefixes."""

from __future__ import annotations

from array import array

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

from umbel.runtime.kv_cache import Mark, NodeClass, RadixCache, RadixNode, slots_of

Prefix = tuple[int, ...]
Place = tuple[str, Prefix]

NAMESPACES = st.sampled_from(["", "adapter"])
TOKENS = st.lists(st.integers(0, 2), max_size=14)


class CacheMachine(RuleBasedStateMachine):
    """Each cached prefix (with its namespace) has a page; locks, marks and steps name prefixes."""

    locks = Bundle("locks")

    @initialize(page_size=st.sampled_from([1, 1, 2, 4]))
    def start(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self.page_size = page_size
        self.marks: dict[Mark, Place] = {}
        self.page: dict[Place, int] = {}  # of each prefix of whole pages: its last one
        self.time: dict[Place, int] = {}
        self.uncomputed: set[Place] = set()
        self.locked: list[Place] = []
        self.next_page = 0
        self.now = 0

    # ---- the model

    def longest(self, tokens: list[int], namespace: str, limit: int) -> int:
        length, size = 0, self.page_size
        while length + size <= limit and (namespace, tuple(tokens[: length + size])) in self.page:
            length += size
        return length

    def slots(self, row: list[int], namespace: str, start: int, end: int) -> array[int]:
        size = self.page_size
        pages = [self.page[namespace, tuple(row[: at + size])] for at in range(start, end, size)]
        return slots_of(array("q", pages), size)

    def in_pages(self, length: int) -> int:
        return length - length % self.page_size

    def new_slots(self, num: int) -> array[int]:
        """Slots of fresh pages."""
        assert num % self.page_size == 0
        first = self.next_page * self.page_size
        self.next_page += num // self.page_size
        return array("q", range(first, first + num))

    def node_class(self, place: Place) -> NodeClass:
        namespace, prefix = place
        return max(
            (
                mark.kind
                for mark, (n, p) in self.marks.items()
                if n == namespace and p[: len(prefix)] == prefix
            ),
            default=NodeClass.FREE,
        )

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
        for length in range(0, len(prefix) + 1, self.page_size):
            self.time[namespace, prefix[:length]] = self.now

    def remove(self, pages: array[int]) -> list[Place]:
        places = {page: place for place, page in self.page.items()}
        removed = [places[page] for page in pages]
        assert len(set(removed)) == len(removed)
        for place in removed:
            del self.page[place]
            del self.time[place]
            self.uncomputed.discard(place)
        for mark, (namespace, prefix) in list(self.marks.items()):  # what is lost is not kept
            self.marks[mark] = namespace, prefix[: self.longest([*prefix], namespace, len(prefix))]
        return removed

    # ---- what is done to both

    @rule(tokens=TOKENS, namespace=NAMESPACES, limit=st.integers(0, 16))
    def match(self, tokens: list[int], namespace: str, limit: int) -> None:
        limit = min(limit, len(tokens))
        expected = self.longest(tokens, namespace, limit)
        assert self.cache.probe(tokens, namespace, limit).num_tokens == expected
        num, node, slots = self.cache.match_prefix(tokens, namespace, limit)
        assert num == expected
        assert slots == self.slots(tokens, namespace, 0, num)
        assert [t for n in node.path() for t in n.key] == tokens[:num]
        assert self.cache.probe(tokens, namespace, limit).num_tokens == expected

    @rule(
        target=locks,
        tokens=TOKENS,
        namespace=NAMESPACES,
        limit=st.integers(0, 16),
        computed=st.booleans(),
    )
    def insert(
        self, tokens: list[int], namespace: str, limit: int, computed: bool
    ) -> tuple[Place, RadixNode]:
        """Insert the rest of a row below a match that may be cut short."""
        tokens = tokens[: self.in_pages(len(tokens))]
        held = self.locked_match(tokens[:limit], namespace)
        return self.inserted(held, tokens[len(held[0][1]) :], computed)

    @rule(target=locks, held=consumes(locks), tokens=TOKENS, computed=st.booleans())
    def insert_below(
        self, held: tuple[Place, RadixNode], tokens: list[int], computed: bool
    ) -> tuple[Place, RadixNode]:
        return self.inserted(held, tokens[: self.in_pages(len(tokens))], computed)

    def inserted(
        self, held: tuple[Place, RadixNode], tokens: list[int], computed: bool
    ) -> tuple[Place, RadixNode]:
        (namespace, prefix), node = held
        row, start = [*prefix, *tokens], len(prefix)
        slots = self.new_slots(len(tokens))
        present, end = self.cache.insert(node, tokens, slots[:], computed=computed)
        assert start + present == self.longest(row, namespace, len(row))
        assert [t for n in end.path() for t in n.key] == row
        for at in range(start + present, len(row), self.page_size):
            place = (namespace, tuple(row[: at + self.page_size]))
            self.page[place] = slots[at - start] // self.page_size
            if not computed:
                self.uncomputed.add(place)
        return self.lock_moved(held[0], row), end

    def lock_moved(self, place: Place, row: list[int]) -> Place:
        """Note that the lock of a place is now that of a row which goes on from it."""
        namespace, prefix = place
        self.locked.remove(place)
        self.locked.append((namespace, tuple(row)))
        self.now += 1
        for length in range(len(prefix) + self.page_size, len(row) + 1, self.page_size):
            self.time[namespace, tuple(row[:length])] = self.now
        return namespace, tuple(row)

    @rule(target=locks, tokens=TOKENS, namespace=NAMESPACES)
    def lock(self, tokens: list[int], namespace: str) -> tuple[Place, RadixNode]:
        return self.locked_match(tokens, namespace)

    def locked_match(self, tokens: list[int], namespace: str) -> tuple[Place, RadixNode]:
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
        assert slots == self.slots(row, namespace, len(prefix), num)
        self.cache.lock(lower, until=node)
        return self.lock_moved(held[0], row[:num]), lower

    @rule(held=consumes(locks))
    def unlock(self, held: tuple[Place, RadixNode]) -> None:
        place, node = held
        assert [t for n in node.path() for t in n.key] == list(place[1])  # splits keep the end
        self.cache.unlock(node)
        self.locked.remove(place)
        self.touch(place)

    @rule(tokens=TOKENS, namespace=NAMESPACES, is_live=st.booleans())
    def mark(self, tokens: list[int], namespace: str, is_live: bool) -> None:
        node = self.cache.find(tokens, namespace)
        length = self.longest(tokens, namespace, len(tokens))
        assert (node is None) == (length == 0)
        if node is not None:
            mark = self.cache.mark(node, NodeClass.LIVE if is_live else NodeClass.PROMISED)
            self.marks[mark] = namespace, tuple(tokens[:length])

    @precondition(lambda self: self.marks)
    @rule(which=st.integers(0))
    def unmark(self, which: int) -> None:
        mark = list(self.marks)[which % len(self.marks)]
        _, prefix = self.marks.pop(mark)
        assert (mark.node is None) == (not prefix)
        assert mark.node is None or [t for n in mark.node.path() for t in n.key] == list(prefix)
        self.cache.unmark(mark)
        self.cache.unmark(mark)  # once more does nothing

    @rule(num=st.integers(0, 12))
    def evict(self, num: int) -> None:
        live = NodeClass.LIVE
        removable = [place for place in self.page if self.is_removable(place)]
        classes = {place: self.node_class(place) for place in removable}
        times = dict(self.time)
        pages = self.cache.evict(num)
        evictable = sum(node_class is not live for node_class in classes.values())
        assert len(pages) == min(num, evictable)
        removed = self.remove(pages)
        inner = {(n, p[:i]) for n, p in self.page for i in range(len(p))}
        left = [p for p in self.page if p not in inner and self.is_removable(p)]
        ages = [(classes[place], times[place]) for place in removed]
        assert all(node_class is not live for node_class, _ in ages), "a live node was evicted"
        last = max(ages, default=(NodeClass.FREE, 0))
        assert all((classes[place], times[place]) >= last for place in left), "not the first to go"

    @rule()
    def step_completes(self) -> None:
        self.cache.mark_computed()
        self.uncomputed.clear()

    @precondition(lambda self: not any(map(self.is_locked, self.uncomputed)))
    @rule()
    def step_fails(self) -> None:
        lost = {
            (namespace, prefix)
            for namespace, prefix in self.page
            if any((namespace, prefix[: i + 1]) in self.uncomputed for i in range(len(prefix)))
        }
        assert set(self.remove(self.cache.drop_uncomputed())) == lost

    # ---- what always holds

    @invariant()
    def cache_equals_model(self) -> None:
        self.cache.check()
        for namespace in ("", "adapter"):  # an unused namespace is forgotten, and its age with it
            if not any(n == namespace for n, _ in [*self.page, *self.locked]):
                self.time.pop((namespace, ()), None)
        size = self.page_size
        assert self.cache.total == len(self.page) * size
        assert self.cache.num_protected == sum(map(self.is_locked, self.page)) * size
        pages = {slot // size for node in self.cache.nodes() for slot in node.slots}
        assert pages == set(self.page.values())
        for node in self.cache.nodes():
            namespace = next(ns for ns in ("", "adapter") if node.path()[0].parent is self.root(ns))
            place = (namespace, tuple(t for n in node.path() for t in n.key))
            assert node.node_class is self.node_class(place)

    def root(self, namespace: str) -> RadixNode | None:
        return self.cache._roots.get(namespace)


TestRadixCache = CacheMachine.TestCase
TestRadixCache.settings = settings(stateful_step_count=40)
