"""The tree of token prefixes: where each is found, and how nodes are split; knows no use of them.

A prefix is found by (namespace, tokens). A tier in host memory would give a node a second place
for its pages, beside `slots`; an index map of its own (sliding windows) would be a second list of
slots per node, let go from the front: neither changes a key.
"""

from __future__ import annotations

from array import array

from .radix_node import PrefixMatch, PrefixProbe, RadixNode, common_length, page_key


class RadixTree:
    """Runs of tokens and their slots, one tree per namespace; with `page_size`, in whole pages."""

    def __init__(self, page_size: int = 1) -> None:
        self.page_size = page_size
        self.num_nodes = 0
        self._roots: dict[str, RadixNode] = {}

    def root(self, namespace: str = "") -> RadixNode:
        """Return where a namespace's prefixes start; it exists while it has prefixes or locks."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = RadixNode(None, [], array("q"), True)
        return root

    def match_prefix(
        self, tokens: list[int], namespace: str = "", limit: int | None = None
    ) -> PrefixMatch:
        """Find the longest cached prefix of `tokens[:limit]`, in whole pages.

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
        at, end = self._descend(node, tokens, start, limit)
        slots = array("q")
        for part in end.path(below=node):
            slots += part.slots
        return PrefixMatch(at, end, slots)

    def probe(
        self, tokens: list[int], namespace: str = "", limit: int | None = None
    ) -> PrefixProbe:
        """Return how many tokens `match_prefix` would find; change nothing."""
        limit = len(tokens) if limit is None else min(limit, len(tokens))
        root = self._roots.get(namespace)
        if root is None:
            return PrefixProbe(0, None)
        at, node, _ = self._walk(root, tokens, 0, limit)
        return PrefixProbe(at, node)

    def find(self, tokens: list[int], namespace: str = "") -> RadixNode | None:
        """Return the node that ends the longest cached prefix; None if nothing is cached."""
        root = self._roots.get(namespace)
        if root is None:
            return None
        _, node = self._descend(root, tokens, 0, len(tokens))
        return None if node is root else node

    def nodes(self) -> list[RadixNode]:
        """Return every node but the roots, parents first."""
        found: list[RadixNode] = list(self._roots.values())
        for node in found:
            found += node.children.values()
        return found[len(self._roots) :]

    def _walk(
        self, node: RadixNode, tokens: list[int], at: int, limit: int
    ) -> tuple[int, RadixNode, int]:
        """Follow tokens[at:limit] down from the end of `node`, in whole pages.

        Returns how far they go, the last node reached, and how many of its own tokens they cover.
        """
        size, covered = self.page_size, len(node.key)
        while at + size <= limit and covered == len(node.key):
            child = node.children.get(page_key(tokens, at, size))
            if child is None:
                break
            node = child
            covered = common_length(node.key, tokens, at, limit)
            covered -= covered % size
            at += covered
        return at, node, covered

    def _descend(
        self, node: RadixNode, tokens: list[int], at: int, limit: int
    ) -> tuple[int, RadixNode]:
        """Follow tokens[at:limit] down from the end of `node`; return where to, and the node there.

        A node that they end or leave inside of is split.
        """
        at, node, covered = self._walk(node, tokens, at, limit)
        return at, node if covered == len(node.key) else self._split(node, covered)

    def _add_child(
        self, parent: RadixNode, key: list[int], slots: array[int], computed: bool
    ) -> RadixNode:
        node = RadixNode(parent, key, slots, computed)
        node.last_used = parent.last_used
        parent.children[page_key(key, 0, self.page_size)] = node
        self.num_nodes += 1
        return node

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
        upper.num_live, upper.num_promised = node.num_live, node.num_promised
        upper.children[page_key(node.key, at, self.page_size)] = node
        parent.children[page_key(upper.key, 0, self.page_size)] = upper
        node.parent = upper
        node.key = node.key[at:]
        node.slots = node.slots[at:]
        self.num_nodes += 1
        return upper

    def _take_out(self, node: RadixNode) -> RadixNode:
        """Take a leaf out of the tree and return its parent, where its marks end from now on."""
        parent = node.parent
        assert parent is not None
        del parent.children[page_key(node.key, 0, self.page_size)]
        for mark in node.marks:  # they are counted there already
            mark.node = None if parent.parent is None else parent
        if parent.parent is not None:
            parent.marks += node.marks
        node.parent = None
        self.num_nodes -= 1
        return parent

    def _forget_empty_root(self, root: RadixNode) -> None:
        if root.children or root.lock_count:
            return
        for namespace, at in self._roots.items():
            if at is root:
                del self._roots[namespace]
                return
