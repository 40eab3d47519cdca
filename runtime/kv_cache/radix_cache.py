"""What of the prefix tree is needed, and by whom: lock, mark, insert, evict; knows no tensor.

Nodes are added when their rows are *scheduled* and carry `computed=False` until the step has run,
so requests of one step can share them, and a failed step can take them back. Locks count per path:
a locked node's ancestors are locked too, so what is unlocked can always be evicted from the leaves
upwards. Marks count per path in the same way and say which class a node is of.
"""

from __future__ import annotations

from array import array

from .eviction import LeafQueue, may_go
from .pages import pages_of, slots_of
from .radix_node import InsertResult, Mark, NodeClass, RadixNode, page_key
from .radix_tree import RadixTree


class RadixCache(RadixTree):
    """Token prefixes and their slots, with who holds them.

    Pages belong to the tree from `insert` until `evict` or `drop_uncomputed` returns them.
    `num_evictable + num_protected == total`, counted in slots; `num_promised` are evictable ones
    that somebody keeps for programs to come.
    """

    def __init__(self, page_size: int = 1) -> None:
        super().__init__(page_size)
        self.num_evictable = 0
        self.num_protected = 0
        self.num_promised = 0
        self._uncomputed: list[RadixNode] = []  # and what was split off above them
        self._clock = 0
        self._leaves = LeafQueue()

    @property
    def total(self) -> int:
        """Slots that the tree holds."""
        return self.num_evictable + self.num_protected

    def insert(
        self, node: RadixNode, tokens: list[int], slots: array[int], *, computed: bool = True
    ) -> InsertResult:
        """Add `tokens`, held by `slots`, as the continuation of `node`: whole pages.

        The first `num_present` of them were there already: their slots stay the caller's, the tree
        takes the rest, and may keep the two arguments. The caller's lock on `node` moves down to
        the end.
        """
        assert len(tokens) % self.page_size == 0, "a part of a page cannot be shared"
        assert node.lock_count > 0, "insert without a lock"
        present, end = self._descend(node, tokens, 0, len(tokens))
        if present < len(tokens):
            if present:
                tokens, slots = tokens[present:], slots[present:]
            if end is node and computed and _is_own_leaf(node):
                node.key += tokens
                node.slots += slots
                self.num_protected += len(tokens)
            else:
                end = self._add_child(end, tokens, slots, computed)
                self.num_evictable += len(tokens)
                if not computed:
                    self._uncomputed.append(end)
        self.lock(end, until=node)
        return InsertResult(present, end)

    def lock(self, node: RadixNode, until: RadixNode | None = None) -> None:
        """Keep the path to `node` from eviction, below its ancestor `until` when that is given.

        `until` moves a lock that is held on the ancestor down to `node`.
        """
        self._clock += 1
        at: RadixNode | None = node
        while at is not None and at is not until:
            if at.lock_count == 0:
                self.num_evictable -= len(at.key)
                self.num_protected += len(at.key)
                if at.num_promised:
                    self.num_promised -= len(at.key)
            at.lock_count += 1
            at.last_used = self._clock
            at = at.parent

    def unlock(self, node: RadixNode) -> None:
        """Give back one lock on the path to `node`."""
        self._clock += 1
        at: RadixNode = node
        while True:
            assert at.lock_count > 0, "unlock without a lock"
            at.lock_count -= 1
            at.last_used = self._clock
            if at.parent is None:
                break
            if at.lock_count == 0:
                self.num_evictable += len(at.key)
                self.num_protected -= len(at.key)
                if at.num_promised:
                    self.num_promised += len(at.key)
                self._leaves.push(at, self.num_nodes)
            at = at.parent
        self._forget_empty_root(at)

    def mark(self, node: RadixNode, kind: NodeClass) -> Mark:
        """Make the path to `node` live or promised, until `unmark`; keep the mark for it."""
        assert node.parent is not None, "a root holds nothing to keep"
        mark = Mark(node, kind)
        node.marks += (mark,)
        self._count_mark(node, kind, 1)
        return mark

    def unmark(self, mark: Mark) -> None:
        """Take a mark back. Idempotent."""
        node, mark.node = mark.node, None
        if node is not None:
            node.marks = tuple(other for other in node.marks if other is not mark)
            self._count_mark(node, mark.kind, -1)

    def evict(self, num_pages: int) -> array[int]:
        """Take `num_pages` pages out of unlocked leaves and return them.

        Free ones go before promised ones, the least recently used first; the last leaf may lose
        only its end. Live, locked and uncomputed nodes stay: fewer come back when only they are
        left.
        """
        size = self.page_size
        freed = array("q")
        while len(freed) < num_pages:
            node = self._leaves.pop()
            if node is None:
                break
            missing = (num_pages - len(freed)) * size
            if missing < len(node.key):
                freed += pages_of(node.slots[-missing:], size)
                del node.slots[-missing:]
                del node.key[-missing:]
                self.num_evictable -= missing
                if node.num_promised:
                    self.num_promised -= missing
                self._leaves.push(node, self.num_nodes)
            else:
                freed += pages_of(node.slots, size)
                self._remove(node)
        return freed

    def mark_computed(self) -> None:
        """Note that the step has run: what it registered now holds KV."""
        for node in self._uncomputed:
            for part in _uncomputed_path(node):
                part.computed = True
            self._leaves.push(node, self.num_nodes)
        self._uncomputed.clear()

    def drop_uncomputed(self) -> array[int]:
        """Remove all that a failed step registered and what lies beneath; return the pages.

        None of it may be locked any more.
        """
        freed = array("q")
        for uncomputed in self._uncomputed:
            if uncomputed.parent is None:  # went with an ancestor
                continue
            order = _uncomputed_path(uncomputed)[-1:]
            for node in order:
                order += node.children.values()
            for node in reversed(order):
                assert node.lock_count == 0, "a row of a failed step is still in use"
                freed += pages_of(node.slots, self.page_size)
                self._remove(node)
        self._uncomputed.clear()
        return freed

    def _remove(self, node: RadixNode) -> None:
        self.num_evictable -= len(node.key)
        if node.num_promised:
            self.num_promised -= len(node.key)
        parent = self._take_out(node)
        if parent.parent is None:
            self._forget_empty_root(parent)
        else:
            self._leaves.push(parent, self.num_nodes)

    def _count_mark(self, node: RadixNode, kind: NodeClass, change: int) -> None:
        at = node
        while at.parent is not None:
            if kind is NodeClass.LIVE:
                at.num_live += change
            else:
                before, at.num_promised = at.num_promised, at.num_promised + change
                if at.lock_count == 0 and (before == 0 or at.num_promised == 0):
                    self.num_promised += change * len(at.key)
            at = at.parent
        self._leaves.push(node, self.num_nodes)  # its class may be another now

    def check(self) -> None:
        """Assert every invariant of the tree, its counts and its eviction queue."""
        nodes = self.nodes()
        assert len(nodes) == self.num_nodes, "num_nodes is wrong"
        queued = {id(node) for node in self._leaves.current()}
        size = self.page_size
        uncomputed = {id(part) for node in self._uncomputed for part in _uncomputed_path(node)}
        protected = evictable = promised_slots = 0
        seen: set[int] = set()
        for node in nodes:
            assert node.key, "an empty node"
            assert len(node.key) == len(node.slots), "a token without a slot"
            assert node.parent is not None
            key = page_key(node.key, 0, size)
            assert node.parent.children.get(key) is node, "parent and child disagree"
            assert len(node.key) % size == 0, "a part of a page"
            assert node.slots == slots_of(pages_of(node.slots, size), size), "a page is torn"
            assert seen.isdisjoint(node.slots), "a slot is in the tree twice"
            seen.update(node.slots)
            locks_below = sum(c.lock_count for c in node.children.values())
            assert node.lock_count >= locks_below >= 0, "a locked node under a less locked one"
            last_used = max((c.last_used for c in node.children.values()), default=0)
            assert node.lock_count or node.last_used >= last_used, "a child outlives its parent"
            assert node.computed != (id(node) in uncomputed), "computed nodes and the step's differ"
            below = node.children.values()
            live = sum(mark.kind is NodeClass.LIVE for mark in node.marks)
            assert node.num_live == live + sum(child.num_live for child in below), "marks are lost"
            promised = len(node.marks) - live + sum(child.num_promised for child in below)
            assert node.num_promised == promised, "marks are lost"
            assert all(mark.node is node for mark in node.marks), "a mark is not where it says"
            if may_go(node):
                assert id(node) in queued, "a leaf that may go is not queued for eviction"
            if node.lock_count:
                protected += len(node.key)
            else:
                evictable += len(node.key)
                promised_slots += len(node.key) if node.num_promised else 0
        assert protected == self.num_protected, "num_protected is wrong"
        assert evictable == self.num_evictable, "num_evictable is wrong"
        assert promised_slots == self.num_promised, "num_promised is wrong"
        assert len(seen) == self.total, "slots were lost"


def _is_own_leaf(node: RadixNode) -> bool:
    """Whether nobody but the caller, who has locked it, can tell that a computed leaf grows."""
    if node.lock_count > 1 or node.children or node.marks:
        return False
    return node.computed and node.parent is not None


def _uncomputed_path(node: RadixNode) -> list[RadixNode]:
    """Return what of the path to a node a step has still to compute, the node itself first."""
    path: list[RadixNode] = []
    while not node.computed and node.parent is not None:
        path.append(node)
        node = node.parent
    return path
