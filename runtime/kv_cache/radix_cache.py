"""The tree of token prefixes over KV slots: match, insert, lock, evict; knows no tensor.

A node holds a run of tokens and the slot of each. Nodes are added when their rows are *scheduled*
and carry `computed=False` until the step has run, so requests of one step can share them, and a
failed step can take them back. Locks count per path: a locked node's ancestors are locked too, so
what is unlocked can always be evicted from the leaves upwards.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple


class RadixNode:
    """A run of tokens that continues its parent's; a root (no parent) is empty."""

    __slots__ = ("children", "computed", "key", "last_used", "lock_count", "parent", "slots")

    def __init__(
        self, parent: RadixNode | None, key: list[int], slots: list[int], computed: bool
    ) -> None:
        self.parent = parent
        self.key = key
        self.slots = slots
        self.computed = computed
        self.children: dict[int, RadixNode] = {}  # by the first token of the child's key
        self.lock_count = 0
        self.last_used = 0

    def path(self) -> list[RadixNode]:
        """Return the nodes from below the root to this one."""
        nodes: list[RadixNode] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class PrefixMatch(NamedTuple):
    """The longest prefix that is in the cache."""

    num_tokens: int
    node: RadixNode  # ends exactly at the match; lock it before anything is evicted
    slots: list[int]


class PrefixProbe(NamedTuple):
    """How far a prefix is in the cache, without a change to the tree."""

    num_tokens: int
    node: RadixNode | None  # the deepest node reached, perhaps only its first tokens


class InsertResult(NamedTuple):
    """What an insertion found."""

    num_present: int  # leading tokens that were in the tree: their new slots are not used
    node: RadixNode  # ends at the last token


class RadixCache:
    """Token prefixes and their slots, one tree per namespace.

    Slots belong to the tree from `insert` until `evict` or `drop_uncomputed` returns them.
    `num_evictable + num_protected == total`, counted in slots.
    """

    def __init__(self) -> None:
        self.num_evictable = 0
        self.num_protected = 0
        self.num_nodes = 0
        self._roots: dict[str, RadixNode] = {}
        self._uncomputed: list[RadixNode] = []
        self._clock = 0
        self._pushed = 0
        # (last use, order, node) of leaves that may go; entries go stale and are skipped
        self._leaves: list[tuple[int, int, RadixNode]] = []

    @property
    def total(self) -> int:
        """Slots that the tree holds."""
        return self.num_evictable + self.num_protected

    def root(self, namespace: str = "") -> RadixNode:
        """Return where a namespace's prefixes start; it exists while it has prefixes or locks."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixNode(None, [], [], True)
        return root

    def match_prefix(
        self, tokens: list[int], namespace: str = "", limit: int | None = None
    ) -> PrefixMatch:
        """Find the longest cached prefix of `tokens[:limit]`.

        A node that matches in part is split there, so that the match can be locked exactly.
        Rows scheduled in the current step match too.
        """
        limit = len(tokens) if limit is None else min(limit, len(tokens))
        return self.extend_match(self.root(namespace), tokens, 0, limit)

    def extend_match(
        self, node: RadixNode, tokens: list[int], start: int, limit: int
    ) -> PrefixMatch:
        """Go on from `node`, which ends at `start`: `match_prefix` for a row matched before.

        The slots are those of the rows from `start` on.
        """
        slots: list[int] = []
        at = start
        while at < limit:
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common_length(child.key, tokens, at, limit)
            if common < len(child.key):
                node = self._split(child, common)
                slots += node.slots
                at += common
                break
            slots += child.slots
            at += common
            node = child
        return PrefixMatch(at, node, slots)

    def probe(
        self, tokens: list[int], namespace: str = "", limit: int | None = None
    ) -> PrefixProbe:
        """Return how many tokens `match_prefix` would find; change nothing."""
        limit = len(tokens) if limit is None else min(limit, len(tokens))
        node = self._roots.get(namespace)
        at = 0
        while node is not None and at < limit:
            child = node.children.get(tokens[at])
            if child is None:
                break
            common = _common_length(child.key, tokens, at, limit)
            at += common
            node = child
            if common < len(child.key):
                break
        return PrefixProbe(at, node)

    def insert(
        self, node: RadixNode, tokens: list[int], slots: list[int], *, computed: bool = True
    ) -> InsertResult:
        """Add `tokens`, held by `slots`, as the continuation of `node`.

        The first `num_present` of them were there already: their slots stay the caller's. The
        tree takes the rest, unlocked and as recently used as what it continues.
        """
        at = 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                new = RadixNode(node, tokens[at:], slots[at:], computed)
                node.children[tokens[at]] = new
                new.last_used = node.last_used
                self.num_nodes += 1
                self.num_evictable += len(new.key)
                if computed:
                    self._push_if_free_leaf(new)
                else:
                    self._uncomputed.append(new)
                return InsertResult(at, new)
            common = _common_length(child.key, tokens, at, len(tokens))
            node = self._split(child, common) if common < len(child.key) else child
            at += common
        return InsertResult(at, node)

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
                self._push_if_free_leaf(at)
            at = at.parent
        self._forget_empty_root(at)

    def evict(self, num: int) -> list[int]:
        """Take `num` slots out of unlocked leaves, least recently used first; return them.

        Returns fewer only when no more are evictable. The last leaf may lose only its end.
        Locked nodes and nodes of the current step stay.
        """
        freed: list[int] = []
        while len(freed) < num and self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if node.last_used != last_used or not self._is_free_leaf(node):
                continue
            missing = num - len(freed)
            if missing < len(node.key):
                freed += node.slots[-missing:]
                del node.slots[-missing:]
                del node.key[-missing:]
                self.num_evictable -= missing
                self._push_if_free_leaf(node)
            else:
                freed += node.slots
                self._remove(node)
        return freed

    def mark_computed(self) -> None:
        """Note that the step has run: what it registered now holds KV."""
        for node in self._uncomputed:
            node.computed = True
            self._push_if_free_leaf(node)
        self._uncomputed.clear()

    def drop_uncomputed(self) -> list[int]:
        """Remove all that a failed step registered and what lies beneath; return the slots.

        None of it may be locked any more.
        """
        freed: list[int] = []
        for top in self._uncomputed:
            if top.parent is None:  # went with an ancestor
                continue
            order = [top]
            for node in order:
                order += node.children.values()
            for node in reversed(order):
                assert node.lock_count == 0, "a row of a failed step is still in use"
                freed += node.slots
                self._remove(node)
        self._uncomputed.clear()
        return freed

    def _split(self, node: RadixNode, at: int) -> RadixNode:
        """Cut a node in two and return the upper part; `node` stays the lower one.

        So whoever holds `node` still holds the same prefix.
        """
        parent = node.parent
        assert parent is not None
        assert 0 < at < len(node.key)
        upper = RadixNode(parent, node.key[:at], node.slots[:at], node.computed)
        upper.lock_count = node.lock_count
        upper.last_used = node.last_used
        upper.children[node.key[at]] = node
        parent.children[upper.key[0]] = upper
        node.parent = upper
        node.key = node.key[at:]
        node.slots = node.slots[at:]
        self.num_nodes += 1
        if not node.computed:
            self._uncomputed.append(upper)
        return upper

    def _remove(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[0]]
        self.num_nodes -= 1
        self.num_evictable -= len(node.key)
        node.parent = None
        if parent.parent is None:
            self._forget_empty_root(parent)
        else:
            self._push_if_free_leaf(parent)

    def _forget_empty_root(self, root: RadixNode) -> None:
        if root.children or root.lock_count:
            return
        for namespace, at in self._roots.items():
            if at is root:
                del self._roots[namespace]
                return

    def _is_free_leaf(self, node: RadixNode) -> bool:
        return (
            node.lock_count == 0 and not node.children and node.computed and node.parent is not None
        )

    def _push_if_free_leaf(self, node: RadixNode) -> None:
        if not self._is_free_leaf(node):
            return
        if len(self._leaves) > 2 * self.num_nodes + 64:  # mostly stale: start anew
            self._leaves = [e for e in self._leaves if self._is_current(e)]
            heapq.heapify(self._leaves)
        self._pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._pushed, node))

    def _is_current(self, entry: tuple[int, int, RadixNode]) -> bool:
        return entry[0] == entry[2].last_used and self._is_free_leaf(entry[2])

    def nodes(self) -> list[RadixNode]:
        """Return every node but the roots, parents first."""
        found: list[RadixNode] = list(self._roots.values())
        for node in found:
            found += node.children.values()
        return found[len(self._roots) :]

    def check(self) -> None:
        """Assert every invariant of the tree, its counts and its eviction queue."""
        nodes = self.nodes()
        assert len(nodes) == self.num_nodes, "num_nodes is wrong"
        queued = {id(e[2]) for e in self._leaves if self._is_current(e)}
        uncomputed = {id(n) for n in self._uncomputed if n.parent is not None}
        protected = evictable = 0
        seen: set[int] = set()
        for node in nodes:
            assert node.key, "an empty node"
            assert len(node.key) == len(node.slots), "a token without a slot"
            assert node.parent is not None
            assert node.parent.children.get(node.key[0]) is node, "parent and child disagree"
            assert seen.isdisjoint(node.slots), "a slot is in the tree twice"
            seen.update(node.slots)
            locks_below = sum(c.lock_count for c in node.children.values())
            assert node.lock_count >= locks_below >= 0, "a locked node under a less locked one"
            last_used = max((c.last_used for c in node.children.values()), default=0)
            assert node.lock_count or node.last_used >= last_used, "a child outlives its parent"
            assert node.computed != (id(node) in uncomputed), "computed nodes and the step's differ"
            if self._is_free_leaf(node):
                assert id(node) in queued, "a leaf that may go is not queued for eviction"
            if node.lock_count:
                protected += len(node.key)
            else:
                evictable += len(node.key)
        assert protected == self.num_protected, "num_protected is wrong"
        assert evictable == self.num_evictable, "num_evictable is wrong"
        assert len(seen) == self.total, "slots were lost"


def _common_length(key: list[int], tokens: list[int], start: int, limit: int) -> int:
    """Return how many leading tokens of `key` continue `tokens[:start]`, at most to `limit`.

    Compares slices (at C speed) and halves the range that holds the first difference.
    """
    end = min(len(key), limit - start)
    if tokens[start : start + end] == (key if end == len(key) else key[:end]):
        return end
    low, high = 0, end  # equal before low; a difference before high
    while high - low > 1:
        middle = (low + high) // 2
        if tokens[start + low : start + middle] == key[low:middle]:
            low = middle
        else:
            high = middle
    return low
